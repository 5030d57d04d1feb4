"""Keys or values of one layer as packed rows that grow, with copies beside them. Knows no models or read plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kvtuner.errors import CacheError, ProfileError
from kvtuner.precision import NO_WINDOW, ExactWindow

if TYPE_CHECKING:
    from kvtuner.runtime_loader.row_format import RowFormat

MIN_GROWTH_TOKENS: Final = 16
MAX_DRAFT_TOKENS: Final = 64
"""The tokens of a chunk that may be removed again, as an assistant's are, with no loss of copies before them."""


class TokenBuffer:
    """A tensor [batch, tokens, ...] that is appended to in place; it has room for whole groups of tokens."""

    def __init__(self, group: int = 1) -> None:
        self._data: Tensor | None = None
        self._length = 0
        self._group = group

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> Tensor | None:
        """A view of what was appended, [batch, tokens, ...]; None before the first append."""
        return None if self._data is None else self._data[:, : self._length]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the rows in use."""
        return 0 if self.rows is None else self.rows.nbytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffer, spare capacity included."""
        return 0 if self._data is None else self._data.nbytes

    def append(self, rows: Tensor) -> None:
        """Append [batch, tokens, ...]; all but the tokens must be as in the first call."""
        past = self._length
        self.reserve(rows)[:, past : self._length] = rows.detach()

    def reserve(self, rows: Tensor) -> Tensor:
        """Make room for more tokens like these [batch, tokens, ...]; the places of all, [batch, capacity, ...]."""
        length = self._length + rows.shape[1]
        if self._data is None:
            self._data = _allocate(rows, self._rounded_up(length))
        assert (self._data.shape[0], self._data.dtype) == (rows.shape[0], rows.dtype)
        capacity = self._data.shape[1]
        if length > capacity:
            # By a quarter, so that appending n tokens one by one copies O(n) in all.
            grown = capacity + max(capacity // 4, MIN_GROWTH_TOKENS)
            self._move(self._data[:, : self._length], self._rounded_up(max(length, grown)))
        self._length = length
        return self._data

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on; the capacity stays."""
        self._length = min(self._length, length)

    def take(self, indices: Tensor) -> None:
        """Replace the batch by its entries `indices`, integer or boolean."""
        if self._data is not None:
            self._move(self._data[indices.to(self._data.device), : self._length], self._data.shape[1])

    def clear(self) -> None:
        """Forget everything and free the memory."""
        self._data, self._length = None, 0

    def _rounded_up(self, tokens: int) -> int:
        return -(-tokens // self._group) * self._group

    def _move(self, rows: Tensor, capacity: int) -> None:
        self._data = _allocate(rows, capacity)
        self._data[:, : rows.shape[1]] = rows


def _allocate(like: Tensor, capacity: int) -> Tensor:
    # A tensor born in inference mode could not be written in place after it.
    with torch.inference_mode(False):
        return torch.empty((like.shape[0], capacity, *like.shape[2:]), dtype=like.dtype, device=like.device)


class ExactCopies:
    """The exact copies of one side beside its rows: of the first tokens and of the last, as far as they are at hand.

    A removal of the newest chunk's tokens, but for its first, loses no copies, up to `MAX_DRAFT_TOKENS` tokens. After
    any other the remaining tokens have copies only as far as they had some: others read rows.
    """

    def __init__(self, window: ExactWindow) -> None:
        self.window = window
        self._first: Tensor | None = None  # [batch, num_heads, sinks at most, head_dim]
        self._last: Tensor | None = None  # [batch, num_heads, residual_length and candidates at most, head_dim]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(copies.nbytes for copies in (self._first, self._last) if copies is not None)

    def append(self, states: Tensor) -> Tensor | None:
        """Take the next tokens [batch, num_heads, tokens, head_dim], and return the newest ones at hand, likewise."""
        if not self.window.num_tokens:
            return None
        states = states.detach()
        first = states if self._first is None else torch.cat((self._first, states), dim=2)
        last = states if self._last is None else torch.cat((self._last, states), dim=2)
        kept = self.window.residual_length
        kept += min(states.shape[2] - 1, MAX_DRAFT_TOKENS) if kept else 0
        # Copied out, or a view would keep the whole chunk.
        self._first = first[:, :, : self.window.sinks].clone()
        self._last = last[:, :, max(last.shape[2] - kept, 0) :].clone()
        return last

    @property
    def first(self) -> Tensor | None:
        """The copies of sinks, [batch, num_heads, tokens, head_dim]."""
        return self._first

    def put_first_over(self, read: Tensor) -> None:
        """Write the copies of sinks over all tokens [batch, num_heads, tokens, head_dim] as read from rows."""
        if self._first is not None:
            read[:, :, : self._first.shape[2]] = self._first

    @property
    def last(self) -> Tensor | None:
        """The copies of the newest tokens at hand, [batch, num_heads, tokens, head_dim]."""
        return self._last

    def put_before_last(self, read: Tensor) -> None:
        """Take what rows gave for the tokens [batch, num_heads, tokens, head_dim] before the newest at hand."""
        assert self._last is not None
        self._last = torch.cat((read, self._last), dim=2)

    def truncate(self, length: int, removed: int) -> None:
        """Forget the last `removed` tokens, of which `length` remain."""
        if self._first is not None and self._last is not None:
            self._first = self._first[:, :, :length]
            self._last = self._last[:, :, : max(self._last.shape[2] - removed, 0)]

    def take(self, indices: Tensor) -> None:
        """Replace the batch by its entries `indices`, integer or boolean."""
        if self._first is not None and self._last is not None:
            indices = indices.to(self._first.device)
            self._first, self._last = self._first[indices], self._last[indices]

    def clear(self) -> None:
        """Forget everything."""
        self._first = self._last = None


def _with_newest(read: Tensor, newest: Tensor | None, most: int) -> Tensor:
    """The last tokens read [batch, num_heads, tokens, head_dim] with at most so many copies written over their end."""
    count = 0 if newest is None else min(newest.shape[2], most, read.shape[2])
    if newest is not None and count:
        read[:, :, -count:] = newest[:, :, -count:]
    return read


class PackedSide:
    """Keys, or values, of one layer; a side of 16 bits needs no copies."""

    def __init__(self, row_format: RowFormat, window: ExactWindow = NO_WINDOW, token_group: int = 1) -> None:
        self.format = row_format
        self.buffer = TokenBuffer(token_group)
        self.copies = ExactCopies(NO_WINDOW if row_format.spec is None else window)

    def check(self, states: Tensor) -> None:
        """Check that keys or values [batch, num_heads, tokens, head_dim] can be stored.

        Heads or channels of another format are a `ProfileError`; another batch or native dtype is a `CacheError`.
        """
        heads, channels = states.shape[1], states.shape[-1]
        if (heads, channels) != (self.format.num_heads, self.format.head_dim):
            raise ProfileError(
                f"the profile stores {self.format.num_heads} KV heads of {self.format.head_dim} channels, but"
                f" attention gave {heads} of {channels}; this cache holds all heads of a model, on one rank"
            )
        rows = self.buffer.rows
        if rows is None:
            return
        if rows.shape[0] != states.shape[0]:
            raise CacheError(
                f"the cache holds a batch of {rows.shape[0]}, but was given one of {states.shape[0]};"
                " reset() it or use another"
            )
        if self.format.spec is None and rows.dtype != states.dtype:
            raise CacheError(f"the cache holds {rows.dtype}, but was given {states.dtype}; reset() it or use another")

    def extend(self, states: Tensor, *, fresh_is_exact: bool, num_copies: int = 0) -> Tensor:
        """Store a chunk [batch, num_heads, tokens, head_dim] and return all tokens that its queries read, likewise.

        With `fresh_is_exact` the chunk is read as it came; earlier tokens are always read from their rows, but for
        sinks. The result begins with the newest `num_copies` tokens, exact where there is a copy; places before the
        first token hold any numbers, which the mask hides.
        """
        past, tokens = len(self.buffer), states.shape[2]
        newest = self.copies.append(states)
        self._store(states, newest)
        if fresh_is_exact and past == 0:
            return states
        if fresh_is_exact:
            read = torch.cat((self._read(past, states.dtype, newest), states), dim=2)
        else:
            read = self._read(past + tokens, states.dtype, newest)
        self.copies.put_first_over(read)
        if not num_copies:
            return _with_newest(read, newest, self.copies.window.residual_length)
        near = torch.nn.functional.pad(read[:, :, -num_copies:], (0, 0, max(num_copies - past - tokens, 0), 0))
        return torch.cat((_with_newest(near, newest, num_copies), read), dim=2)

    def due(self, states: Tensor, newest: Tensor | None) -> tuple[int, Tensor]:
        """What a chunk that is about to be stored gives rows to; `newest` are the copies at hand with it.

        That is the first such token, and its states with those behind it, [batch, num_heads, tokens, head_dim].
        """
        return len(self.buffer), states

    def _store(self, states: Tensor, newest: Tensor | None) -> None:
        """Store the rows that a chunk gives."""
        first, packed = self.due(states, newest)
        places = self.reserve(states)
        if packed.shape[2]:
            places[:, first : first + packed.shape[2]] = self.format.pack(packed.detach().transpose(1, 2))

    def _read(self, length: int, dtype: torch.dtype, newest: Tensor | None) -> Tensor:
        """The first tokens [batch, num_heads, length, head_dim] as their rows give them back."""
        rows = self.buffer.rows
        assert rows is not None
        return self.format.unpack(rows[:, :length], dtype).transpose(1, 2)

    def reserve(self, states: Tensor) -> Tensor:
        """Make room for the rows of a chunk [batch, num_heads, tokens, head_dim]: [batch, capacity, ...]."""
        batch, num_heads, tokens, head_dim = states.shape
        if self.format.spec is None:
            return self.buffer.reserve(states.new_empty(batch, tokens, num_heads, head_dim))
        row_bytes = self.format.row_bytes(states.dtype)
        return self.buffer.reserve(states.new_empty(batch, tokens, row_bytes, dtype=torch.uint8))

    def exact(self, positions: Tensor, newest: Tensor | None) -> Tensor:
        """Copies of tokens [batch, tokens, num_heads, head_dim] as they came: sinks, and the `newest` at hand."""
        first = self.copies.first
        if newest is None or first is None:
            rows = self.buffer.rows
            assert rows is not None and self.format.spec is None
            return rows[:, positions]
        num_first, start = int((positions < first.shape[2]).sum()), len(self.buffer) - newest.shape[2]
        others = positions[num_first:]
        parts = [first[:, :, :num_first], newest[:, :, others[others >= start] - start]]
        lost = others[others < start]
        if len(lost):  # copies of values, where keys per channel have what rows gave for a group without its own
            rows = self.buffer.rows
            assert rows is not None
            parts.insert(1, self.format.unpack(rows[:, lost], newest.dtype).transpose(1, 2))
        return torch.cat(parts, dim=2).transpose(1, 2).contiguous()

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        removed = max(len(self.buffer) - length, 0)
        self.buffer.truncate(length)
        self.copies.truncate(length, removed)

    def take(self, indices: Tensor) -> None:
        """Replace the batch by its entries `indices`, integer or boolean."""
        self.buffer.take(indices)
        self.copies.take(indices)

    def clear(self) -> None:
        """Forget everything and free the memory."""
        self.buffer.clear()
        self.copies.clear()


class PerChannelSide(PackedSide):
    """Keys of one layer with a scale for some tokens of a channel, which are packed once their group is full.

    A group's tokens are counted from the first one that was stored, padding included. Those of a group that is not full
    are read from their copies, which the window always has: it is at least as long as a group. Where a removal left a
    group without some, these tokens are what its rows gave, and are stored again from that once the group is full.
    """

    def __init__(self, row_format: RowFormat, window: ExactWindow) -> None:
        super().__init__(row_format, window, row_format.token_group)
        self._group = row_format.token_group
        assert window.residual_length >= self._group

    def due(self, states: Tensor, newest: Tensor | None) -> tuple[int, Tensor]:
        """The groups that a chunk fills, as `PackedSide.due` has them."""
        past, length = len(self.buffer), len(self.buffer) + states.shape[2]
        start, stop = self._in_groups(past), self._in_groups(length)
        return start, _between(newest, start, stop, length)

    def _read(self, length: int, dtype: torch.dtype, newest: Tensor | None) -> Tensor:
        full = self._in_groups(len(self.buffer))
        if length <= full:
            return super()._read(-(-length // self._group) * self._group, dtype, newest)[:, :, :length]
        rest = _between(newest, full, length, len(self.buffer)).to(dtype)
        return torch.cat((super()._read(full, dtype, newest), rest), dim=2) if full else rest.clone()

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        whole, last, rows = self._in_groups(length), self.copies.last, self.buffer.rows
        stored = len(self.buffer)
        super().truncate(length)
        missing = 0 if last is None else min(stored - last.shape[2], length) - whole
        if missing > 0 and rows is not None and last is not None:
            group = self.format.unpack(rows[:, whole : whole + self._group], last.dtype).transpose(1, 2)
            self.copies.put_before_last(group[:, :, :missing])

    def _in_groups(self, tokens: int) -> int:
        """The tokens of full groups among the first ones."""
        return tokens // self._group * self._group


def _between(newest: Tensor | None, start: int, stop: int, length: int) -> Tensor:
    """The copies of tokens `start` to `stop`, of the newest of so many."""
    assert newest is not None and start >= length - newest.shape[2]
    first = length - newest.shape[2]
    return newest[:, :, start - first : stop - first]


def packed_side(row_format: RowFormat, window: ExactWindow, token_group: int = 1) -> PackedSide:
    """The side that stores rows of a format, with room for whole groups of the tokens that share a scale of keys."""
    if row_format.token_group > 1:
        return PerChannelSide(row_format, window)
    return PackedSide(row_format, window, token_group)
