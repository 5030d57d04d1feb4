"""The attention of a transformers model that reads a cache's packed rows where they lie. Knows no caches or profiles.

A cache stores a chunk and gives attention the chunk's own keys, with a `StoredChunk` beside them; `PackedAttention`
then reads the rows of all tokens before, without reading them back. Registered with AttentionInterface and
AttentionMaskInterface, so no model code is patched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kvtuner.errors import CacheError, ServingError, UnsupportedModelError
from kvtuner.runtime_loader import cpu
from kvtuner.runtime_loader.attention_backends import backend_for
from kvtuner.runtime_loader.exact_ring import EMPTY, ExactRing, WindowReads
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling
from kvtuner.supported_models import refuse_other_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from kvtuner.runtime_loader.packed_attention import PackedAttention
    from kvtuner.runtime_loader.packed_layer import PackedSide
    from kvtuner.runtime_loader.row_format import RowFormat

ATTENTION_IN_PLACE: Final = "kvtuner_in_place"
_CHUNK: Final = "kvtuner_chunk"
"""The attribute of a chunk's keys that holds its `StoredChunk`."""


def register_attention_in_place() -> str:
    """Register the attention and mask functions; idempotent. Returns the implementation's name."""
    AttentionInterface.register(ATTENTION_IN_PLACE, _attention)
    AttentionMaskInterface.register(ATTENTION_IN_PLACE, _mask)
    return ATTENTION_IN_PLACE


def attention_in_place(
    model: PreTrainedModel, formats: Sequence[RowFormat], wanted: bool | None
) -> PackedAttention | None:
    """The attention that reads rows of a model in place, or None where it is not wanted, or by default cannot.

    `ServingError` where it is wanted and cannot be had, with the reason.
    """
    if wanted is False:
        return None
    reason = None
    if model.device.type != "cpu":
        reason = f"{model.device} is no processor"
    elif model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reason = f"there is none for {model.dtype}"
    elif any(each.spec is not None and each.spec.fp8 for each in formats):
        reason = "there is none for fp8"
    if reason is not None:
        if wanted:
            raise ServingError(f"rows cannot be read in place: {reason}")
        return None
    backend = backend_for(torch.device("cpu"), cpu.BACKEND if wanted else None)
    return _native_attention() if backend.name == cpu.BACKEND else None


@cache
def _native_attention() -> PackedAttention:
    return backend_for(torch.device("cpu"), cpu.BACKEND).make(torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk of one layer that was stored, and what its queries read.

    Attributes:
        attention: The implementation that reads rows.
        keys: The rows of all places of a batch, the capacity of each sequence side by side.
        values: The rows of the values of the same places.
        k: The chunk's keys as they came, [batch, num_kv_heads, tokens, head_dim].
        v: The chunk's values, [batch, num_kv_heads, tokens, v_head_dim].
        num_past: The tokens of each sequence before the chunk, padding included.
        capacity: The places of each sequence.
        is_exact: Whether the chunk reads itself as it came.
        ring: The copies at hand under an exact window, with positions that count padding.
    """

    attention: PackedAttention
    keys: PackedRows
    values: PackedRows
    k: Tensor
    v: Tensor
    num_past: int
    capacity: int
    is_exact: bool
    ring: ExactRing | None

    @classmethod
    def store(
        cls, attention: PackedAttention, sides: tuple[PackedSide, PackedSide], k: Tensor, v: Tensor, *, is_exact: bool
    ) -> StoredChunk:
        """Store keys and values [batch, num_kv_heads, tokens, channels] behind what the sides hold."""
        num_past, num_tokens = len(sides[0].buffer), k.shape[2]
        newest = [side.copies.append(states) for side, states in zip(sides, (k, v), strict=True)]
        due = [side.due(states, copies) for side, states, copies in zip(sides, (k, v), newest, strict=True)]
        rows = [side.reserve(states) for side, states in zip(sides, (k, v), strict=True)]
        keys, values = (PackedRows(each.flatten(0, 1), side.format) for each, side in zip(rows, sides, strict=True))
        slots = _new_slots(*due[1], rows[1].shape[1])
        if keys.format.token_group == 1:
            attention.store(keys, values, slots, _by_slot(k), _by_slot(v))
        else:
            attention.store_side(keys, _new_slots(*due[0], rows[0].shape[1]), _by_slot(due[0][1]))
            attention.store_side(values, slots, _by_slot(v))
        ring = _ring(sides, newest, num_past, num_tokens, with_chunk=num_tokens == 1 and not is_exact)
        return cls(attention, keys, values, k, v, num_past, rows[0].shape[1], is_exact, ring)

    def beside(self, k: Tensor) -> Tensor:
        """Keys that carry this chunk to attention."""
        carried = k.view_as(k)
        setattr(carried, _CHUNK, self)
        return carried

    def attend(self, q: Tensor, is_token: Tensor | None, scores: ScoreScaling) -> Tensor:
        """The attention of queries [batch, num_heads, tokens, head_dim]: [batch, tokens, num_heads, v_head_dim].

        `is_token` says which tokens are no padding, bool [batch, num_past + tokens]; queries of padding get zeros.
        """
        batch, _, num_tokens, _ = q.shape
        padding = _padding(is_token, batch)
        past = (self.num_past - padding).clamp(min=0)
        new = (self.num_past + num_tokens - padding).clamp(max=num_tokens)
        is_query = torch.arange(num_tokens) >= (num_tokens - new).unsqueeze(1)
        queries = q.transpose(1, 2)[is_query]
        window = None if self.ring is None else WindowReads(self._ring_without(padding), torch.arange(batch))
        if num_tokens == 1 and not self.is_exact and bool(is_query.all()):
            slots = self._slots(padding, past + 1)
            found = self.attention.decode(
                queries, self.keys, self.values, _indptr(past + 1), slots, scores, window=window
            )
        else:
            found = self._extend(queries, is_query, padding, past, new, scores, window)
        output = q.new_zeros(batch, num_tokens, q.shape[1], self.v.shape[-1])
        output[is_query] = found
        return output

    def _extend(
        self, q: Tensor, is_query: Tensor, padding: Tensor, past: Tensor, new: Tensor, scores: ScoreScaling,
        window: WindowReads | None,
    ) -> Tensor:  # fmt: skip
        k, v = (states.transpose(1, 2)[is_query] for states in (self.k, self.v))
        if not self.is_exact:
            at = (self.num_past + torch.arange(is_query.shape[1])).expand_as(is_query)
            places = (at + torch.arange(len(at)).unsqueeze(1) * self.capacity)[is_query]
            stored = self.keys.read(places, k.dtype), self.values.read(places, v.dtype)
            if window is None:
                k, v = stored
            else:
                window = WindowReads(window.ring, window.requests, stored)
        bounds = ExtendBounds(_indptr(new), _indptr(past), self._slots(padding, past), int(new.max()))
        return self.attention.extend(q, k, v, self.keys, self.values, bounds, scores, window=window)

    def _slots(self, padding: Tensor, lengths: Tensor) -> Tensor:
        """The token slots of so many tokens of each sequence behind its padding, one sequence after the other."""
        return torch.cat(
            [
                torch.arange(start, start + length) + sequence * self.capacity
                for sequence, (start, length) in enumerate(zip(padding.tolist(), lengths.tolist(), strict=True))
            ]
        )

    def _ring_without(self, padding: Tensor) -> ExactRing:
        """The copies with positions that do not count padding."""
        ring = self.ring
        assert ring is not None
        if not padding.any():
            return ring
        if ring.window.sinks:
            raise CacheError(
                "the sinks of a padded batch count its padding, so that rows cannot be read in place; give it within"
                ' "with cache.attending(model, in_place=False):"'
            )
        positions = (ring.positions - padding.unsqueeze(1)).clamp(min=EMPTY)
        return ExactRing(ring.keys, ring.values, positions.to(torch.int32), ring.window)


def _new_slots(first: int, states: Tensor, capacity: int) -> Tensor:
    """The token slots of states [batch, num_heads, tokens, channels] from a token on, one sequence after the other."""
    batch, _, num_tokens, _ = states.shape
    return (torch.arange(first, first + num_tokens) + torch.arange(batch).unsqueeze(1) * capacity).flatten()


def _by_slot(states: Tensor) -> Tensor:
    """States [batch, num_heads, tokens, channels] in the order of `_new_slots`, [slots, num_heads, channels]."""
    return states.transpose(1, 2).flatten(0, 1)


def _ring(
    sides: tuple[PackedSide, PackedSide], newest: list[Tensor | None], num_past: int, num_tokens: int,
    *, with_chunk: bool,
) -> ExactRing | None:  # fmt: skip
    """The copies of the tokens before a chunk, or with it, of the `newest` that are at hand with it."""
    packed = next((index for index, copies in enumerate(newest) if copies is not None), None)
    if packed is None:
        return None
    window, at_hand = sides[packed].copies.window, newest[packed]
    assert at_hand is not None
    end = num_past + num_tokens
    num_sinks, start = min(window.sinks, end), end - at_hand.shape[2]
    if with_chunk:
        start = max(start, end - window.residual_length)
    else:
        end = num_past
    last = torch.arange(start, max(end, start))
    positions = torch.cat((torch.arange(num_sinks), last[last >= num_sinks]))
    keys, values = (side.exact(positions, copies) for side, copies in zip(sides, newest, strict=True))
    return ExactRing(keys, values, positions.to(torch.int32).expand(len(keys), -1).contiguous(), window)


def _padding(is_token: Tensor | None, batch: int) -> Tensor:
    """The padding before each sequence of a batch; `CacheError` where there is some behind its first token."""
    if is_token is None:
        return torch.zeros(batch, dtype=torch.int64)
    padding = (~is_token).sum(1)
    if bool((is_token != (torch.arange(is_token.shape[1]) >= padding.unsqueeze(1))).any()):
        raise CacheError(
            "padding behind the first token of a sequence cannot be read in place; pad on the left, or give it within"
            ' "with cache.attending(model, in_place=False):"'
        )
    return padding


def _indptr(lengths: Tensor) -> Tensor:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def _mask(*, attention_mask: Tensor | None, **rest: Any) -> Tensor | None:
    """The tokens that are no padding, bool [batch, tokens]; None where all are. Every model is causal here."""
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    where = f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
    refuse_other_attention(where, rest)
    chunk: StoredChunk | None = getattr(key, _CHUNK, None)
    if chunk is None:
        raise UnsupportedModelError(
            f"{where} changes the keys that a cache gave it, so that rows cannot be read in place; give chunks within"
            ' "with cache.attending(model, in_place=False):"'
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return chunk.attend(query, attention_mask, ScoreScaling(scale, softcap or 0.0)), None
