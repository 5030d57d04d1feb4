"""Times prefill: chunks of new tokens behind a prefix, by each way of a server of ours and by SGLang's own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_parts import baselines, flash_rivals
from gpu_parts.pools import ALL_TRANSFORMS, TINY, HeadShape, batch_of, filled, states
from gpu_parts.speed import timed
from kvtuner.precision import PrecisionPair
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import ExtendBounds, ScoreScaling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from gpu_parts.machine import Machine
    from gpu_parts.pools import Layer
    from gpu_parts.speed import Row
    from kvtuner.runtime_loader.sglang.attention.flash_prefill import FlashAttention

    Run = Callable[[], Tensor]

STORED: Final = (("K8V8", "none"), ("K4V4", "none"), ("K4V4", ALL_TRANSFORMS), ("K4V2", "none"))
LOADS: Final = ((1, 0, 8192), (1, 24576, 8192), (1, 122880, 8192), (8, 4096, 1024))
"""The requests, the prefix of each and its new tokens: the last chunks of 8k, 32k and 128k, and a batch of hits."""
TINY_LOAD: Final = (2, 24, 130)


def grid(machine: Machine, shape: HeadShape) -> list[tuple[HeadShape, int, int, int]]:
    """The loads of a shape."""
    return [(TINY, *TINY_LOAD)] if machine.smoke else [(shape, *load) for load in LOADS]


@dataclass(frozen=True, slots=True)
class TimedChunk:
    """The new tokens of a batch of equal requests, and what they read.

    Attributes:
        q: Queries [tokens, heads, channels]; `k` and `v` are the new keys and values.
        bounds: The bounds of new tokens and prefixes, and the slots of prefixes.
        slots: The slots of prefixes and new tokens, request after request.
        length: The tokens of a request with its prefix.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: ExtendBounds
    slots: Tensor
    length: int

    @classmethod
    def of(cls, machine: Machine, shape: HeadShape, num_requests: int, prefix: int, new: int) -> TimedChunk:
        """Random states of requests whose tokens lie anywhere in a pool that has no room for more."""
        length = prefix + new
        slots = batch_of(machine, num_requests, length, num_requests * length, 1).slots[0]
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        q, k, v = (
            states(machine, num_requests * new, count, shape.head_dim, seed) for seed, count in enumerate(heads, 3)
        )
        requests = torch.arange(num_requests + 1, device=machine.device)
        prefixes = slots.view(num_requests, length)[:, :prefix].flatten()
        bounds = ExtendBounds(new * requests, (prefix * requests).int(), prefixes, new)
        return cls(q, k, v, bounds, slots, length)


def run(machine: Machine, shape: HeadShape, num_requests: int, prefix: int, new: int) -> Iterator[Row]:
    """A row for every way and pair; seconds of one layer, whose new tokens are stored already."""
    base: Row = {"shape": shape.name, "batch": num_requests, "prefix": prefix, "tokens": new}
    chunk = TimedChunk.of(machine, shape, num_requests, prefix, new)
    attention = TritonAttention(machine.device)
    rows = filled(machine, attention, shape, baselines.NATIVE, len(chunk.slots))
    row = {**base, "pair": str(baselines.NATIVE), "kind": "none", "kernel": "sglang extend"}
    yield timed(machine, row, _only, functools.partial(by_sglang, chunk, rows))
    del rows
    yield from _rival_rows(machine, shape, base, chunk)
    for pair, kind in STORED[1:2] if machine.smoke else STORED:
        rows = filled(machine, attention, shape, PrecisionPair.parse(pair), len(chunk.slots), kind)
        for kernel, make in attention_runs(machine, attention, chunk, rows).items():
            yield timed(machine, {**base, "pair": pair, "kind": kind, "kernel": kernel}, _only, make)
        del rows


def _only(make: Callable[[], Run]) -> list[Callable[[], object]]:
    return [make()]


def _rival_rows(machine: Machine, shape: HeadShape, base: Row, chunk: TimedChunk) -> Iterator[Row]:
    """Rows of what else SGLang prefills by; in fp8 a cache of half the bytes, whose row is no bf16 baseline."""
    if machine.smoke:
        return
    num_slots, new = len(chunk.slots), base["tokens"]
    for name, (dtype, load, runs) in flash_rivals.PREFILL_RIVALS.items():

        def make(load: Callable[[], Any] = load, runs: Any = runs, dtype: torch.dtype | None = dtype) -> list[Any]:
            kernel = _imported(load)
            given = (chunk.q, chunk.length, [chunk.slots], num_slots, dtype, new)
            return list(runs(machine, kernel, shape, *given))

        pair = str(baselines.NATIVE) if dtype is None else "fp8"
        yield timed(machine, {**base, "pair": pair, "kind": "none", "kernel": name}, make)


def attention_runs(
    machine: Machine, attention: TritonAttention, chunk: TimedChunk, rows: Layer
) -> dict[str, Callable[[], Run]]:
    """What makes a run of each way in which a server attends to chunks over packed rows."""
    q, k, v, bounds = chunk.q, chunk.k, chunk.v, chunk.bounds
    scores = ScoreScaling(q.shape[-1] ** -0.5)
    out = torch.empty_like(q)

    def one_buffer() -> Run:
        from kvtuner.runtime_loader.sglang.attention.flash_prefill import FlashPrefill

        prefill = FlashPrefill(flash_of(machine, q.shape[-1]), attention)

        def attend() -> Tensor:
            if not prefill.attend(q, k, v, *rows, bounds, scores.scale, out, chunk.length):
                raise RuntimeError("prefixes are not read back for so few tokens, or are too long for that")
            return out

        return attend

    return {
        "one buffer, flash attention": one_buffer,
        "read back, sglang extend": functools.partial(by_sglang, chunk, rows, attention),
        "packed extend": lambda: functools.partial(attention.extend, q, k, v, *rows, bounds, scores, out),
    }


def by_sglang(chunk: TimedChunk, rows: Layer, reader: TritonAttention | None = None) -> Run:
    """A run of SGLang's own extend kernel, over 16-bit rows, or over packed ones that a reader reads back first."""
    kernel, out = _imported(sglang_extend), torch.empty_like(chunk.q)
    q, k, v, bounds = chunk.q, chunk.k, chunk.v, chunk.bounds

    def attend() -> Tensor:
        stored = (rows[0].rows, rows[1].rows) if reader is None else reader.read_prefix(q, *rows, bounds)
        if stored is None:
            raise RuntimeError("prefixes are not read back for so few tokens, or are too long for that")
        kernel(
            q, k, v, out, *stored, bounds.tokens, bounds.prefix, bounds.slots, None, True, None, bounds.longest, 1.0,
            1.0, sm_scale=q.shape[-1] ** -0.5, identity_kv_indices=reader is not None,
        )  # fmt: skip
        return out

    return attend


def sglang_extend() -> Any:
    """SGLang's function."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    return extend_attention_fwd


def _imported(load: Callable[[], Any]) -> Any:
    """What is loaded, or a `RuntimeError`, which a row tells, where another package cannot be imported."""
    try:
        return load()
    except Exception as error:  # a package of binaries may raise anything
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def flash_of(machine: Machine, head_dim: int) -> FlashAttention:
    """SGLang's flash attention, or torch's in a smoke test; a `RuntimeError` says why there is none."""
    if machine.smoke:
        return attended_in_turn
    from kvtuner.runtime_loader.sglang.compat.attention.flash import flash_attention

    flash, why = flash_attention(machine.device, machine.dtype, {head_dim})
    if flash is None:
        raise RuntimeError(why)
    return flash


def attended_in_turn(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, ends: Tensor, most_queries: int, most_keys: int, scale: float,
    out: Tensor,
) -> Tensor:  # fmt: skip
    """A `FlashAttention` in torch, which knows no variable lengths: request after request."""
    for request in range(len(ends) - 1):
        new, read = (slice(int(bounds[request]), int(bounds[request + 1])) for bounds in (queries, ends))
        count, length = new.stop - new.start, read.stop - read.start
        hidden = torch.ones(count, length, dtype=torch.bool, device=q.device).triu(1 + length - count)
        by_head = [x.transpose(0, 1).unsqueeze(0) for x in (q[new], k[read], v[read])]
        attended = scaled_dot_product_attention(
            by_head[0], by_head[1], by_head[2], attn_mask=~hidden, scale=scale, enable_gqa=True
        )
        out[new] = attended[0].transpose(0, 1)
    return out
