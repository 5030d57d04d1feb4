"""How long attention over rows takes, and writing and reading them, beside bf16 in the same run."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Final

import torch
from launch_candidates import CANDIDATES

from gpu_parts import baselines
from gpu_parts.pools import LLAMA, QWEN, TINY, Shape, batch_of, empty_rows, filled, row_format, states
from kvtuner.precision import PrecisionPair
from kvtuner.runtime_loader.kernels import launch
from kvtuner.runtime_loader.kernels.attention import TritonAttention
from kvtuner.runtime_loader.kernels.scratch import Scratch
from kvtuner.runtime_loader.kernels.settings import Device
from kvtuner.runtime_loader.kernels.side import KernelSide
from kvtuner.runtime_loader.packed_attention import ExtendBounds, Scores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from gpu_parts.machine import Machine
    from kvtuner.runtime_loader.kernels.settings import DecodeLaunch

PAIRS: Final = tuple(PrecisionPair.parse(pair) for pair in ("K16V16", "K8V8", "K8V4", "K4V4", "K4V2", "K2V2"))
BATCHES: Final = (1, 8, 32, 128)
LENGTHS: Final = (1024, 4096, 16384, 32768, 131072)
MOST_TIMES: Final = 256
COLD: Final = 2.5
"""Last caches that the runs of a graph read in all."""
SPARE_BYTES: Final = 4 << 30
Row = dict[str, Any]


def grid(machine: Machine) -> Iterator[tuple[Shape, int, int]]:
    """Shapes, batches and lengths whose bf16 keys and values fit."""
    if machine.smoke:
        yield TINY, 2, 24
        return
    room = machine.free_bytes - SPARE_BYTES
    for shape in (LLAMA, QWEN):
        for num_requests in BATCHES:
            for length in LENGTHS:
                if 4 * shape.elements(num_requests * length) < room:  # beside those of torch
                    yield shape, num_requests, length


def times_of(machine: Machine, num_bytes: float) -> int:
    """How often a batch is run so that its rows come from memory."""
    return 2 if machine.smoke else min(MOST_TIMES, max(1, round(COLD * machine.l2_bytes / num_bytes)))


def decode(machine: Machine, shape: Shape, num_requests: int, length: int) -> Iterator[Row]:
    """One row for every pair and baseline; seconds of one layer."""
    base = {"shape": shape.name, "batch": num_requests, "length": length}
    num_tokens = num_requests * length
    q = states(machine, num_requests, shape.num_heads, shape.head_dim, 3)
    scores = Scores(shape.head_dim**-0.5)
    for pair in PAIRS:
        attention = TritonAttention(machine.device)
        probe = [row_format(shape, bits) for bits in (pair.k_bits, pair.v_bits)]
        per_token = sum(form.row_bytes(machine.dtype) for form in probe)
        times = times_of(machine, num_tokens * per_token)
        num_slots = max(num_tokens, min(times * num_tokens, 1 << 22))
        keys, values = filled(machine, attention, shape, pair, num_slots)
        batch = batch_of(machine, num_requests, length, num_slots, times)
        attention.prepare([(keys, values)], shape.num_heads, num_requests)
        rivals: dict[str, Callable[..., object]] = {
            "ours": functools.partial(_decoded, attention, (keys, values), scores)
        }
        if pair == baselines.NATIVE:
            kernel, _ = baselines.sglang_kernels()
            if kernel is not None:
                for splits in baselines.SGLANG_SPLITS:
                    rivals[f"sglang triton, {splits} splits"] = baselines.by_sglang(
                        kernel, machine, shape, keys, values, num_requests, splits
                    )
        elif pair.k_bits == pair.v_bits == 4:
            rivals["dequantize then dot"] = baselines.by_dequantizing(machine, shape, keys, values, num_requests)
        for name, rival in rivals.items():
            runs = [functools.partial(rival, q, batch.indptr, slots) for slots in batch.slots]
            yield {**base, "pair": str(pair), "kernel": name, "bytes": num_tokens * per_token,
                   "seconds": machine.seconds(runs)}  # fmt: skip
        del keys, values, rivals, runs, attention
    num_bytes = num_tokens * shape.elements(1) * machine.dtype.itemsize
    for name, runs in baselines.by_torch(
        machine, shape, num_requests, length, min(32, times_of(machine, num_bytes))
    ).items():
        row = {**base, "pair": "K16V16", "kernel": name, "bytes": num_bytes}
        try:
            yield {**row, "seconds": machine.seconds(runs)}
        except RuntimeError as error:  # torch has no such kernel for the shape or the device
            yield {**row, "seconds": None, "why": str(error).splitlines()[0]}


def _decoded(attention: TritonAttention, rows: Any, scores: Scores, q: Tensor, indptr: Tensor, slots: Tensor) -> Tensor:
    return attention.decode(q, *rows, indptr, slots, scores)


def _launched(
    q: Tensor, sides: Any, indptr: Tensor, scores: Scores, settings: DecodeLaunch, splits: int, scratch: Scratch,
    out: Tensor, slots: Tensor,
) -> None:  # fmt: skip
    launch.decode(q, *sides, indptr, slots, scores, settings, splits, scratch.restart(), out)


def pages(machine: Machine) -> Iterator[Row]:
    """Pages of 1, 16 and 64 tokens, anywhere in the pool."""
    shape, num_requests, length = (TINY, 2, 64) if machine.smoke else (LLAMA, 32, 16384)
    q = states(machine, num_requests, shape.num_heads, shape.head_dim, 3)
    for pair in (PrecisionPair(4, 4), PrecisionPair(2, 2)):
        attention = TritonAttention(machine.device)
        keys, values = filled(machine, attention, shape, pair, num_requests * length)
        for page_size in (1, 16, 64):
            batch = batch_of(machine, num_requests, length, num_requests * length, 1, page_size)
            run = functools.partial(
                attention.decode, q, keys, values, batch.indptr, batch.slots[0], Scores(shape.head_dim**-0.5)
            )
            yield {"shape": shape.name, "batch": num_requests, "length": length, "pair": str(pair),
                   "page_size": page_size, "seconds": machine.seconds([run])}  # fmt: skip


def stores(machine: Machine) -> Iterator[Row]:
    """Writing a long chunk, and a batch's new tokens."""
    shape = TINY if machine.smoke else LLAMA
    num_slots = 64 if machine.smoke else 1 << 18
    for num_tokens in (5, 3) if machine.smoke else (16384, 128):
        k, v = (states(machine, num_tokens, shape.num_kv_heads, shape.head_dim, seed) for seed in (1, 2))
        slots = batch_of(machine, 1, num_tokens, num_slots, 8).slots
        base = {"shape": shape.name, "tokens": num_tokens}
        native = (
            empty_rows(machine, row_format(shape, 16), num_slots).rows,
            empty_rows(machine, row_format(shape, 16), num_slots).rows,
        )
        runs = [functools.partial(_indexed, native, each, k, v) for each in slots]
        yield {**base, "pair": "K16V16", "kind": "none", "kernel": "torch index", "seconds": machine.seconds(runs)}
        for pair in PAIRS:
            for kind in ("none", "hadamard", "centered+balanced+hadamard"):
                if pair == baselines.NATIVE and kind != "none":
                    continue
                attention = TritonAttention(machine.device)
                keys, values = (
                    empty_rows(machine, row_format(shape, bits, each), num_slots)
                    for bits, each in ((pair.k_bits, kind), (pair.v_bits, "hadamard" if kind != "none" else "none"))
                )
                runs = [functools.partial(attention.store, keys, values, each, k, v) for each in slots]
                yield {**base, "pair": str(pair), "kind": kind, "kernel": "ours", "seconds": machine.seconds(runs)}


def _indexed(native: Any, slots: Any, k: Any, v: Any) -> None:
    native[0][slots] = k
    native[1][slots] = v


def extends(machine: Machine) -> Iterator[Row]:
    """New tokens behind a prefix: read by the kernel, or read back for another attention, of which that is the start.

    What the second costs beside the reading is bf16 attention over the prefix, here torch's.
    """
    shape, length, counts = (TINY, 24, (2, 5)) if machine.smoke else (LLAMA, 16384, (1, 4, 8, 16, 32, 64, 128, 512))
    for pair in (PrecisionPair(4, 4), PrecisionPair(8, 8)):
        attention = TritonAttention(machine.device)
        keys, values = filled(machine, attention, shape, pair, length)
        slots = batch_of(machine, 1, length, length, 1).slots[0]
        prefix = torch.tensor([0, length], dtype=torch.int32, device=machine.device)
        q_like = states(machine, 1, shape.num_heads, shape.head_dim)
        backs = [q_like.new_empty(length, *side.shape[1:]) for side in (keys, values)]
        sides = KernelSide.of(keys), KernelSide.of(values)

        def read_back(sides: Any = sides, backs: Any = backs, slots: Any = slots, prefix: Any = prefix) -> None:
            for side, back in zip(sides, backs, strict=True):
                launch.read(side, slots, prefix[-1:], back)

        base = {"shape": shape.name, "prefix": length, "pair": str(pair)}
        num_bytes = shape.elements(length) * machine.dtype.itemsize + keys.rows.nbytes + values.rows.nbytes
        alone = {**base, "tokens": None, "way": "read back alone", "bytes": num_bytes}
        yield {**alone, "seconds": machine.seconds([read_back])}
        for count in counts:
            q, k, v = (
                states(machine, count, heads, shape.head_dim, heads)
                for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
            )
            bounds = ExtendBounds(prefix.new_tensor([0, count]), prefix, slots, count)
            scores = Scores(shape.head_dim**-0.5)
            fused = functools.partial(attention.extend, q, k, v, keys, values, bounds, scores)
            yield {**base, "tokens": count, "way": "kernel", "seconds": machine.seconds([fused])}

            def with_torch(q: Any = q, backs: Any = backs, read_back: Any = read_back) -> None:
                read_back()
                k_back, v_back = (back.transpose(0, 1).unsqueeze(0) for back in backs)
                torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(0, 1).unsqueeze(0), k_back, v_back, enable_gqa=True
                )

            yield {**base, "tokens": count, "way": "read back, then torch", "seconds": machine.seconds([with_torch])}


def sweep(machine: Machine, pair: PrecisionPair) -> Iterator[Row]:
    """Launch settings of one pair at three loads, for the table."""
    loads = ((TINY, 2, 24),) if machine.smoke else ((LLAMA, 32, 16384), (LLAMA, 1, 131072), (LLAMA, 8, 1024))
    device = Device.of(machine.device)
    for shape, num_requests, length in loads:
        num_tokens = num_requests * length
        attention = TritonAttention(machine.device)
        times = times_of(machine, num_tokens * shape.elements(1) * (pair.k_bits + pair.v_bits) / 16)
        keys, values = filled(machine, attention, shape, pair, num_tokens * times)
        batch = batch_of(machine, num_requests, length, num_tokens * times, times)
        q = states(machine, num_requests, shape.num_heads, shape.head_dim, 3)
        sides = KernelSide.of(keys), KernelSide.of(values)
        scratch, out = Scratch(64 << 20, machine.device), torch.empty_like(q)
        for candidate in CANDIDATES:
            settings = dataclasses.replace(candidate, asm=candidate.asm and not machine.smoke)
            for splits in sorted({device.splits(settings, num_requests, shape.num_kv_heads), 4, 16, 64}):
                run = functools.partial(
                    _launched, q, sides, batch.indptr, Scores(shape.head_dim**-0.5), settings, splits, scratch, out
                )
                row = {"shape": shape.name, "batch": num_requests, "length": length, "pair": str(pair),
                       "launch": dataclasses.asdict(settings), "splits": splits}  # fmt: skip
                try:
                    yield {**row, "seconds": machine.seconds([functools.partial(run, slots) for slots in batch.slots])}
                except Exception as error:  # a setting that does not fit this device
                    yield {**row, "seconds": None, "why": f"{type(error).__name__}: {error}".splitlines()[0]}
