"""Times attention over rows, writing and reading them, beside bf16 in the same run."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

from gpu_parts import baselines, flash_rivals
from gpu_parts.pools import (
    ALL_TRANSFORMS,
    LLAMA,
    TINY,
    HeadShape,
    batch_of,
    empty_layer,
    filled,
    keys_and_values,
    row_format,
    states,
)  # fmt: skip
from kvtuner.precision import SHORT_WORD_BITS, PrecisionPair
from kvtuner.runtime_loader.kernels import launch
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.launch_settings import JOINED, NARROW, DecodeLaunch, Device
from kvtuner.runtime_loader.kernels.scratch import Scratch
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import ExtendBounds, ScoreScaling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from gpu_parts.machine import Machine
    from gpu_parts.pools import Layer

PAIRS: Final = tuple(PrecisionPair.parse(pair) for pair in ("K16V16", "K8V8", "K8V4", "K4V4", "K3V3", "K4V2", "K2V2"))
SHORT_PAIRS: Final = tuple(PrecisionPair.parse(pair) for pair in ("K4V4", "K3V3", "K2V2"))
"""The pairs that are also timed with short words, in groups of half a head."""
BATCHES: Final = (1, 8, 32, 128)
LENGTHS: Final = (1024, 4096, 16384, 32768, 131072)
MOST_TIMES: Final = 1024
COLD: Final = 8
"""The runs of a graph read so many times the bytes of the last cache."""
SPARE_BYTES: Final = 4 << 30
CANDIDATES: Final = tuple(
    DecodeLaunch(tokens, warps, stages, asm=True, registers=registers)
    for tokens, warps, stages, registers in (
        (64, 1, 3, 160), (64, 1, 3, None), (32, 1, 3, 160), (32, 1, 3, None), (64, 2, 3, None), (128, 4, 3, None),
        (64, 4, 2, None), (32, 4, 2, None), (16, 1, 2, None),
    )
)  # fmt: skip
"""The launch settings that `sweep` times and launch_table.py counts."""
JOINED_CANDIDATES: Final = (DecodeLaunch(32, 1, 3, asm=True, registers=160, heads=JOINED),)
"""The same of programs of several KV heads. Blocks of 64 tokens take 4 % fewer instructions, but as much memory as two
such programs, and spill at 4 bits; those of 16 take half as many instructions more."""
JOINED_SWEPT: Final = tuple(
    DecodeLaunch(tokens, warps, stages, asm=True, registers=registers, heads=JOINED)
    for tokens, warps, stages, registers in (
        (32, 1, 3, 160), (32, 1, 4, 160), (32, 2, 3, None), (64, 2, 2, None), (64, 2, 3, None), (16, 1, 4, 128),
    )
)  # fmt: skip
"""Those that `sweep` times, more warps and smaller blocks too, which instructions do not speak for."""
Row = dict[str, Any]


def grid(machine: Machine, shape: HeadShape) -> Iterator[tuple[HeadShape, int, int]]:
    """Batches and lengths of a shape whose bf16 keys and values fit."""
    if machine.smoke:
        yield TINY, 2, 24
        return
    room = machine.free_bytes - SPARE_BYTES
    for num_requests in BATCHES:
        for length in LENGTHS:
            if 4 * shape.elements(num_requests * length) < room:  # beside those of torch
                yield shape, num_requests, length


def times_of(machine: Machine, num_bytes: float) -> int:
    """The number of runs of a batch after which its rows come from memory, not from a cache."""
    return 2 if machine.smoke else min(MOST_TIMES, math.ceil(COLD * machine.l2_bytes / num_bytes))


def timed(machine: Machine, row: Row, runs: Callable[..., list[Callable[[], object]]], *args: Any) -> Row:
    """A row with the seconds of the runs that `runs` makes of `args`, or with the reason why they cannot run."""
    try:
        return {**row, "seconds": machine.seconds(runs(*args))}
    except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
        # Torch has no such kernel for the shape or the device, or there is not enough memory of some kind.
        return {**row, "seconds": None, "why": f"{type(error).__name__}: {error}".splitlines()[0]}


def decode(machine: Machine, shape: HeadShape, num_requests: int, length: int) -> Iterator[Row]:
    """One row for every baseline and pair; seconds of one layer."""
    num_tokens = num_requests * length
    base = {"shape": shape.name, "batch": num_requests, "length": length, "kind": "none"}
    q = states(machine, num_requests, shape.num_heads, shape.head_dim, 3)
    num_bytes = num_tokens * shape.elements(1) * machine.dtype.itemsize
    copies = times_of(machine, num_bytes)
    for name in baselines.of_torch(machine):
        row = {**base, "pair": "K16V16", "kernel": name, "bytes": num_bytes}
        yield timed(machine, row, baselines.by_torch, machine, name, shape, q, length, copies)
    yield from _flash_rows(machine, shape, base, q, num_bytes)
    short = replace(shape, group_size=shape.head_dim // 2, word_bits=SHORT_WORD_BITS)
    stored = [(pair, "none", shape) for pair in PAIRS] + [(pair, "none", short) for pair in SHORT_PAIRS]
    for pair, kind, heads in (*stored, (PrecisionPair(4, 4), ALL_TRANSFORMS, shape)):
        per_token = sum(row_format(heads, bits).row_bytes(machine.dtype) for bits in (pair.k_bits, pair.v_bits))
        times = times_of(machine, num_tokens * per_token)
        num_slots = max(num_tokens, min(times * num_tokens, 1 << 22))
        attention = TritonAttention(machine.device)
        rows = filled(machine, attention, heads, pair, num_slots, kind)
        attention.prepare([rows], heads.num_heads, num_requests)
        batch = batch_of(machine, num_requests, length, num_slots, times)
        for name, kernel in kernels_over(machine, heads, pair, kind, attention, rows, num_requests).items():
            runs = [functools.partial(kernel, q, batch.indptr, slots) for slots in batch.slots]
            row = {**base, "kind": kind, "pair": str(pair), "kernel": name, "bytes": num_tokens * per_token}
            yield timed(machine, row, list, runs)
            del runs, kernel
        del rows, attention


def _flash_rows(machine: Machine, shape: HeadShape, base: Row, q: Tensor, num_bytes: int) -> Iterator[Row]:
    """Rows of what servers decode by; in fp8 a cache of half the bytes, whose row is no bf16 baseline."""
    if machine.smoke:
        return
    num_tokens = base["batch"] * base["length"]
    for name, (dtype, load, runs) in flash_rivals.FLASH_RIVALS.items():
        share = 1 if dtype is None else 2
        times = times_of(machine, num_bytes / share)
        num_slots = max(num_tokens, min(times * num_tokens, 1 << 22))
        row = {**base, "pair": "K16V16" if dtype is None else "fp8", "kernel": name, "bytes": num_bytes // share}
        try:
            kernel = load()
        except Exception as error:  # the import of another package may raise anything
            yield {**row, "seconds": None, "why": f"{type(error).__name__}: {error}".splitlines()[0]}
            continue
        slots = batch_of(machine, base["batch"], base["length"], num_slots, times).slots
        yield timed(machine, row, runs, machine, kernel, shape, q, base["length"], slots, num_slots, dtype)


def kernels_over(
    machine: Machine, shape: HeadShape, pair: PrecisionPair, kind: str, attention: TritonAttention, rows: Layer,
    num_requests: int,
) -> dict[str, Callable[[Tensor, Tensor, Tensor], object]]:  # fmt: skip
    """Our kernel, and all others that read the same rows."""
    scores = ScoreScaling(shape.head_dim**-0.5)

    def ours(q: Tensor, indptr: Tensor, slots: Tensor) -> Tensor:
        return attention.decode(q, *rows, indptr, slots, scores)

    is_short = shape.word_bits == SHORT_WORD_BITS
    kernels: dict[str, Callable[..., object]] = {"ours, short words" if is_short else "ours": ours}
    sglang_kernel, _ = baselines.sglang_kernels()
    if pair == baselines.NATIVE and sglang_kernel is not None:
        for splits in baselines.SGLANG_SPLITS:
            run = baselines.by_sglang(sglang_kernel, machine, shape, *rows, num_requests, splits)
            kernels[f"sglang triton, {splits} splits"] = run
    if pair == PrecisionPair(4, 4) and kind == "none" and not is_short:
        kernels["dequantize then dot"] = baselines.by_dequantizing(machine, shape, *rows, num_requests)
    return kernels


def pages(machine: Machine) -> Iterator[Row]:
    """Rows of decoding over pages of 1, 16 and 64 tokens, anywhere in the pool."""
    shape, num_requests, length = (TINY, 2, 64) if machine.smoke else (LLAMA, 32, 16384)
    q = states(machine, num_requests, shape.num_heads, shape.head_dim, 3)
    for pair in (PrecisionPair(4, 4), PrecisionPair(2, 2)):
        attention = TritonAttention(machine.device)
        keys, values = filled(machine, attention, shape, pair, num_requests * length)
        for page_size in (1, 16, 64):
            batch = batch_of(machine, num_requests, length, num_requests * length, 1, page_size)
            run = functools.partial(
                attention.decode, q, keys, values, batch.indptr, batch.slots[0], ScoreScaling(shape.head_dim**-0.5)
            )
            yield {"shape": shape.name, "batch": num_requests, "length": length, "pair": str(pair),
                   "page_size": page_size, "seconds": machine.seconds([run])}  # fmt: skip


def stores(machine: Machine) -> Iterator[Row]:
    """Rows of writing a long chunk, and a batch's new tokens."""
    shape = TINY if machine.smoke else LLAMA
    num_slots = 64 if machine.smoke else 1 << 18
    for num_tokens in (5, 3) if machine.smoke else (16384, 128):
        k, v = keys_and_values(machine, shape, num_tokens)
        batches = batch_of(machine, 1, num_tokens, num_slots, 8).slots
        base = {"shape": shape.name, "tokens": num_tokens}
        keys, values = (side.rows for side in empty_layer(machine, shape, baselines.NATIVE, num_slots))
        runs = [functools.partial(_indexed, keys, values, slots, k, v) for slots in batches]
        yield {**base, "pair": "K16V16", "kind": "none", "kernel": "torch index", "seconds": machine.seconds(runs)}
        for pair in PAIRS:
            for kind in ("none",) if pair == baselines.NATIVE else ("none", "hadamard", ALL_TRANSFORMS):
                attention = TritonAttention(machine.device)
                layer = empty_layer(machine, shape, pair, num_slots, kind)
                runs = [functools.partial(attention.store, *layer, slots, k, v) for slots in batches]
                yield {**base, "pair": str(pair), "kind": kind, "kernel": "ours", "seconds": machine.seconds(runs)}


def _indexed(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    keys[slots] = k
    values[slots] = v


def extends(machine: Machine) -> Iterator[Row]:
    """Rows of new tokens behind a prefix, which the kernel reads, or which is read back for torch's attention.

    Reading back alone is timed too, beside a gather of bf16 keys and values.
    """
    shape, length, counts = (TINY, 24, (2, 5)) if machine.smoke else (LLAMA, 16384, (1, 4, 16, 32, 64, 128, 256, 512))
    base = {"shape": shape.name, "prefix": length, "tokens": None}
    times = times_of(machine, length * shape.elements(1))
    prefix = torch.tensor([0, length], dtype=torch.int32, device=machine.device)
    q_like = states(machine, 1, shape.num_heads, shape.head_dim)
    backs = [q_like.new_empty(length, shape.num_kv_heads, shape.head_dim) for _ in range(2)]
    moved = 2 * shape.elements(length) * machine.dtype.itemsize
    for pair in (baselines.NATIVE, PrecisionPair(8, 8), PrecisionPair(4, 4)):
        attention = TritonAttention(machine.device)
        rows = filled(machine, attention, shape, pair, length * times)
        batches = batch_of(machine, 1, length, length * times, times).slots
        if pair == baselines.NATIVE:
            gathers = [functools.partial(_gathered, rows, slots, backs) for slots in batches]
            row = {**base, "pair": str(pair), "way": "gather of bf16", "bytes": moved}
            yield timed(machine, row, list, gathers)
        sides = [KernelSide.of(side) for side in rows]
        row_bytes = sum(side.format.row_bytes(machine.dtype) for side in rows)
        row = {**base, "pair": str(pair), "way": "read back alone", "bytes": moved // 2 + length * row_bytes}
        reads = [functools.partial(_read_back, sides, slots, prefix, backs) for slots in batches]
        yield timed(machine, row, list, reads)
        for count in counts:
            q, k, v = (
                states(machine, count, heads, shape.head_dim, heads)
                for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
            )
            row = {**base, "tokens": count, "pair": str(pair)}
            bounds = [ExtendBounds(prefix.new_tensor([0, count]).long(), prefix, slots, count) for slots in batches]
            scores = ScoreScaling(shape.head_dim**-0.5)
            fused = [functools.partial(attention.extend, q, k, v, *rows, bound, scores) for bound in bounds]
            yield timed(machine, {**row, "way": "kernel"}, list, fused)
            other = [functools.partial(_read_then_torch, sides, slots, prefix, backs, q, k, v) for slots in batches]
            yield timed(machine, {**row, "way": "read back, then torch"}, list, other)
        del rows, attention, sides


def _gathered(rows: Layer, slots: Tensor, backs: list[Tensor]) -> None:
    for side, back in zip(rows, backs, strict=True):
        torch.index_select(side.rows, 0, slots, out=back)


def _read_back(sides: list[KernelSide], slots: Tensor, prefix: Tensor, backs: list[Tensor]) -> None:
    for side, back in zip(sides, backs, strict=True):
        launch.read(side, slots, prefix[-1:], back)


def _read_then_torch(
    sides: list[KernelSide], slots: Tensor, prefix: Tensor, backs: list[Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    _read_back(sides, slots, prefix, backs)
    all_k, all_v = (torch.cat(pair).transpose(0, 1).unsqueeze(0) for pair in ((backs[0], k), (backs[1], v)))
    return scaled_dot_product_attention(q.transpose(0, 1).unsqueeze(0), all_k, all_v, enable_gqa=True)


def sweep(machine: Machine, pair: PrecisionPair) -> Iterator[Row]:
    """Rows of one pair under every launch setting at three loads, for the committed table."""
    for load in ((TINY, 2, 24),) if machine.smoke else ((LLAMA, 32, 16384), (LLAMA, 1, 131072), (LLAMA, 8, 1024)):
        yield from _sweep(machine, pair, *load)


def _sweep(machine: Machine, pair: PrecisionPair, shape: HeadShape, num_requests: int, length: int) -> Iterator[Row]:
    num_tokens, attention = num_requests * length, TritonAttention(machine.device)
    times = times_of(machine, num_tokens * shape.elements(1) * (pair.k_bits + pair.v_bits) / 16)
    keys, values = filled(machine, attention, shape, pair, num_tokens * times)
    batch = batch_of(machine, num_requests, length, num_tokens * times, times)
    q = states(machine, num_requests, shape.num_heads, shape.head_dim, 3)
    scratch, out, scores = Scratch(64 << 20, machine.device), torch.empty_like(q), ScoreScaling(shape.head_dim**-0.5)
    layer = launch.LayerSides(KernelSide.of(keys), KernelSide.of(values))

    def run(settings: DecodeLaunch, splits: int, slots: Tensor) -> None:
        launch.decode(q, layer, batch.indptr, slots, scores, settings, splits, scratch.restart(), out)

    programs = [count * Device.of(machine.device).processors for count in (1, 4, 8, 16, 32)]
    joins = shape.num_kv_heads % JOINED == 0 and shape.gqa * JOINED <= NARROW
    candidates = (*CANDIDATES, *(JOINED_SWEPT if joins else ()))[:: 4 if machine.smoke else 1]
    splits_of_processors = {count // (num_requests * shape.num_kv_heads) or 1 for count in programs}
    for candidate, splits in itertools.product(candidates, sorted(splits_of_processors)):
        settings = replace(candidate, asm=candidate.asm and not machine.smoke)
        row = {"shape": shape.name, "batch": num_requests, "length": length, "pair": str(pair)}
        row |= {"launch": asdict(settings), "splits": splits}
        yield timed(machine, row, list, [functools.partial(run, settings, splits, slots) for slots in batch.slots])
