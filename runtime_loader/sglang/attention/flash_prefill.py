"""Prefill by the flash attention that SGLang ships: stored prefixes are read back among new tokens, in one buffer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Protocol

import torch

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.joined_chunk import JoinedChunk
from kvtuner.runtime_loader.packed_attention import ExtendBounds, ScoreScaling
from kvtuner.runtime_loader.sglang.pools.self_test import MANY_TOKENS, tolerance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import PackedAttention, PackedRows

PREFILL_VARIABLE: Final = "KVTUNER_PREFILL"
"""The variable that chooses who attends to long chunks: ``flash`` or ``triton``; flash where it runs by default."""
_TESTED: Final = ((3, 5), (4, 0), (2, 9))
"""The new tokens of the requests of the self-test, and the tokens before them."""


class FlashAttention(Protocol):
    """Causal attention of requests of variable lengths, whose last keys are those of their queries.

    Queries are [tokens, num_heads, head_dim], keys and values [places, num_kv_heads, head_dim]; bounds are int32
    [requests + 1]. The result is written to `out` or, where the function has no such argument, returned.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, ends: Tensor, most_queries: int, most_keys: int,
        scale: float, out: Tensor,
    ) -> Tensor:  # fmt: skip
        """Attend."""


class FlashPrefill:
    """Attention of chunks over packed prefixes and themselves, by a flash attention and who reads prefixes back."""

    def __init__(self, flash: FlashAttention, attention: PackedAttention) -> None:
        self._flash, self._attention = flash, attention
        self._chunk: JoinedChunk | None = None

    def begin(self) -> None:
        """Forget the former forward's places."""
        self._chunk = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds, scale: float,
        out: Tensor, longest: int | None = None,
    ) -> bool:  # fmt: skip
        """Write the attention of new tokens to `out`, as `PackedAttention.extend`, if prefixes are worth reading back.

        `longest` is the most tokens of a request with its prefix, where it is known.
        """
        if len(bounds.tokens) == 1 or not len(q):
            return False
        if self._chunk is None:  # once for all layers of a forward
            self._chunk = JoinedChunk.of(bounds, len(q), longest)
        chunk = self._chunk
        all_k, all_v = k.to(q.dtype), v.to(q.dtype)
        if len(bounds.slots):
            joined = self._attention.read_prefix(q, keys, values, bounds, chunk)
            if joined is None:
                return False
            for fresh, states in zip((all_k, all_v), joined, strict=True):
                states.index_copy_(0, chunk.fresh_places, fresh)
            all_k, all_v = joined
        found = self._flash(
            q, all_k, all_v, chunk.queries, chunk.ends, bounds.longest, chunk.longest, scale, out
        )  # fmt: skip
        if found.data_ptr() != out.data_ptr():
            out.copy_(found)
        return True

    def check(self, layers: Sequence[tuple[PackedRows, PackedRows]], num_heads: int, dtype: torch.dtype) -> None:
        """Attend in every layer of an empty pool, and refuse what differs from `PackedAttention.extend`."""
        generator = torch.Generator().manual_seed(0)
        for keys, values in layers:
            device = keys.rows.device
            group = keys.format.token_group
            most = min(len(keys.rows) - 1, sum(past for _, past in _TESTED) + group - 1) // group * group or group
            stored_at = torch.arange(most, device=device)  # whole groups of keys per channel
            slots = torch.arange(sum(past for _, past in _TESTED), device=device) % most

            def states(count: int, heads: int, channels: int, device: torch.device = device) -> Tensor:
                return torch.randn(count, heads, channels, generator=generator).to(device, dtype)

            self._attention.store(
                keys, values, stored_at, states(most, *keys.shape[1:]), states(most, *values.shape[1:])
            )
            tokens, prefix = (
                torch.tensor([0, *(sum(lengths[:end]) for end in range(1, len(lengths) + 1))], device=device)
                for lengths in zip(*_TESTED, strict=True)
            )
            bounds = ExtendBounds(tokens, prefix.int(), slots, MANY_TOKENS)
            count = sum(new for new, _ in _TESTED)
            q = states(count, num_heads, keys.shape[2])
            k, v = states(count, *keys.shape[1:]), states(count, *values.shape[1:])
            scores, found = ScoreScaling(keys.shape[-1] ** -0.5), torch.full_like(q, torch.nan)
            self.begin()
            attended = self.attend(q, k, v, keys, values, bounds, scores.scale, found)
            self.begin()
            wanted = self._attention.extend(q, k, v, keys, values, bounds, scores).float()
            allowed = 2 * tolerance(self._attention, dtype) * wanted.abs().max()
            if attended and not bool(((found.float() - wanted).abs() <= allowed).all()):
                raise ServingError(
                    "the self-test of flash attention failed: chunks do not attend to what their rows hold; report"
                    f" this, and serve with {PREFILL_VARIABLE}=triton"
                )
            for stored in (keys, values):
                stored.rows[stored_at] = torch.zeros_like(stored.rows[stored_at])


def chosen_prefill() -> str | None:
    """Return what the user chose, None for the default."""
    choice = os.environ.get(PREFILL_VARIABLE) or None
    if choice not in (None, "flash", "triton"):
        raise ServingError(f"{PREFILL_VARIABLE} must be flash or triton, not {choice!r}; unset it for the default")
    return choice
