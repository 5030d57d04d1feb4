"""Checks every kernel against `quant.py` and float64, on this device."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from gpu_parts import baselines
from gpu_parts.checks.latent_checks import LatentCase, check_latents, latent_cases
from gpu_parts.checks.oracle import error_of, exact, miswritten, replayed, share_that_differs, starts_of
from gpu_parts.machine import Machine
from gpu_parts.pools import ALL_TRANSFORMS, TINY, HeadShape, empty_layer, keys_and_values, states
from gpu_parts.prefill import attended_in_turn
from kvtuner.precision import (
    ALL_BITS,
    FITS,
    PACKED_BITS,
    SHORT_WORD_BITS,
    Fit,
    PrecisionPair,
)
from kvtuner.runtime_loader.joined_chunk import JoinedChunk
from kvtuner.runtime_loader.kernels import launch
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.launch_settings import Device
from kvtuner.runtime_loader.kernels.scratch import Scratch
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import ExtendBounds, ScoreScaling
from kvtuner.transforms import candidate_transforms

if TYPE_CHECKING:
    from torch import Tensor

    from gpu_parts.pools import Layer
    from kvtuner.runtime_loader.packed_attention import PackedRows

TOLERANCE: Final = 1e-2
"""The largest error, as a share of the norm: queries and weights are rounded to fp16 once, outputs to their dtype."""
BASELINE_TOLERANCE: Final = 4e-2
"""The same of the straightforward kernel, which rounds keys, values and weights to bf16."""
PROCESSES: Final = max(1, (os.cpu_count() or 1) - 1)
"""The processes that compile and check; on 16 cores, 8 of them left 87 of 222 cases unchecked within the limit."""
LIMIT_S: Final = 170
"""The seconds of this section, which tells first whether anything else is worth its time."""
SPARE_SLOTS: Final = 7
CHUNKS: Final = (3, 200, 5, 1, 90)
"""New tokens of requests, of which enough for their prefixes to be read back."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one layer; values are rotated where keys are.

    The operation `what` is store, read, decode, extend, prefill (prefixes read back among new tokens, for torch's
    attention), graph (decode, captured and replayed), or the baseline kernel.
    The kind is the transform of keys; the tokens in the pool and the new ones are by request. As many splits as fill
    the device are None, and so is the machine's dtype.
    """

    what: str
    pair: PrecisionPair
    shape: HeadShape
    kind: str = ALL_TRANSFORMS
    symmetric: bool = False
    fit: Fit = "minmax"
    logit_cap: float = 0.0
    lengths: tuple[int, ...] = (700, 0, 1, 64, 2300)
    fresh: tuple[int, ...] = (3, 20, 0, 1, 40)
    num_splits: int | None = None
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """The case's name in the report."""
        shape = self.shape
        parts = {
            f"{self.what} {self.pair} {shape.num_kv_heads}x{shape.gqa}x{shape.head_dim}": True,
            self.kind: self.kind != "none",
            f"groups of {shape.group_size}": shape.group_size,
            "short words": shape.word_bits == SHORT_WORD_BITS,
            "symmetric": self.symmetric,
            "fitted": self.fit == "least_squares",
            f"cap {self.logit_cap:g}": self.logit_cap,
            f"{sum(self.lengths)} tokens": len(self.lengths) == 1,
            str(self.dtype).removeprefix("torch."): self.dtype,
        }
        return " ".join(part for part, is_shown in parts.items() if is_shown)

    @property
    def limit(self) -> float:
        """The largest error that passes."""
        if self.what in ("store", "read"):
            return 0.0
        return BASELINE_TOLERANCE if self.what == "baseline" else TOLERANCE


def cases(*, smoke: bool) -> list[Case]:
    """All cases: every pair, transform and shape, though not all of their products."""
    if smoke:
        # Not the baseline: it multiplies bf16, which Triton's interpreter does wrongly.
        operations = ("store", "read", "decode", "extend", "graph")
        listed = [Case(what, PrecisionPair(4, 8), TINY, lengths=(20, 1), fresh=(3, 9)) for what in operations]
        return [*listed, Case("prefill", PrecisionPair(4, 8), TINY, lengths=(20, 1), fresh=(3, 130))]
    shape = HeadShape("", 4, 4, 128)
    grouped = replace(shape, group_size=64)
    pairs = [PrecisionPair(*bits) for bits in itertools.product(ALL_BITS, repeat=2)]
    same = [PrecisionPair(bits, bits) for bits in PACKED_BITS]
    four, kinds = PrecisionPair(4, 4), candidate_transforms("k")
    listed = [Case("decode", pair, shape) for pair in pairs]
    listed += [Case("decode", four, shape, kind) for kind in kinds]
    listed += [
        Case(what, PrecisionPair(*bits), HeadShape("", num_kv_heads, gqa, head_dim), logit_cap=cap)
        for what in ("decode", "extend")
        for num_kv_heads, gqa, head_dim, cap in ((2, 7, 64, 0.0), (3, 1, 80, 5.0), (2, 2, 96, 0.0), (1, 20, 256, 5.0))
        for bits in ((4, 2), (8, 4))
    ]
    one_head = HeadShape("", 1, 4, 128)
    listed += [Case("decode", pair, one_head, "none", lengths=(131072,), num_splits=16) for pair in same]
    listed += [
        Case(what, pair, grouped, "none", symmetric)
        for what, pair, symmetric in itertools.product(("decode", "store", "read"), same, (False, True))
    ]
    short, odd = replace(grouped, word_bits=SHORT_WORD_BITS), HeadShape("", 3, 1, 80, None, SHORT_WORD_BITS)
    listed += [
        Case(what, pair, heads, "none", fit=fit)
        for what, pair, heads in itertools.product(("decode", "store", "read"), same, (short, odd))
        for fit in (FITS if what == "store" else FITS[:1])
    ]
    listed += [
        Case("store", PrecisionPair(*bits), HeadShape("", 3, 1, head_dim), kind, symmetric, "least_squares")
        for head_dim, kind, symmetric in itertools.product((64, 80, 128, 256), ("none", ALL_TRANSFORMS), (False, True))
        for bits in ((2, 4), (4, 2))
    ]
    listed += [Case("decode", four, shape, lengths=(300,) * 1100)]
    listed += [Case("decode", four, shape, dtype=torch.float16), Case("baseline", four, shape, "none")]
    listed += [Case("extend", PrecisionPair(*bits), shape) for bits in ((4, 4), (8, 4), (16, 16), (2, 16))]
    joined = [*same, PrecisionPair(16, 16), PrecisionPair(2, 16)]
    listed += [Case("prefill", pair, shape, fresh=CHUNKS) for pair in joined]
    listed += [Case("graph", PrecisionPair(*bits), shape) for bits in ((4, 4), (8, 2))]
    sides = [(pair, shape, ALL_TRANSFORMS) for pair in pairs if pair.k_bits != pair.v_bits]
    sides += [(four, shape, kind) for kind in kinds]
    sides += [
        (PrecisionPair(4, 8), HeadShape("", 3, 1, head_dim), kind)
        for head_dim, kind in itertools.product((64, 80, 96, 256), ("none", ALL_TRANSFORMS))
    ]
    return listed + [Case(what, *side) for what in ("store", "read") for side in sides]


def check(case: Case, device: str) -> float:
    """The error of a case: of a head's output or, where bits must be equal, the share of tokens that differ."""
    machine = Machine(torch.device(device), case.dtype or (torch.float16 if device == "cpu" else torch.bfloat16))
    num_tokens = sum(case.lengths)
    num_slots = num_tokens + SPARE_SLOTS
    layer = empty_layer(machine, case.shape, case.pair, num_slots, case.kind, symmetric=case.symmetric, fit=case.fit)
    # Bytes of 255 read as NaN, so that a kernel that reads a slot too many shows it. The baseline masks no NaN.
    unwritten = 0 if case.what == "baseline" else 255
    for side in layer:
        side.rows.fill_(torch.nan if side.format.spec is None else unwritten)
    k, v = keys_and_values(machine, case.shape, num_tokens)
    k, v = k + 1.0, v * 3.0
    if case.what in ("store", "read"):
        _put_special_groups(k, v)
    slots = torch.randperm(num_slots, device=machine.device)[:num_tokens]
    attention = TritonAttention(machine.device)
    attention.store(*layer, slots, k, v)
    if case.what == "store":
        return max(miswritten(side, slots, x) for side, x in zip(layer, (k, v), strict=True))
    if case.what == "read":
        return max(_misread(machine, side, slots) for side in layer)
    if case.what in ("extend", "prefill"):
        return _extend_error(case, machine, attention, layer, slots)
    return _decode_error(case, machine, attention, layer, slots)


def _extend_error(case: Case, machine: Machine, attention: TritonAttention, layer: Layer, slots: Tensor) -> float:
    shape = case.shape
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k_new, v_new = (
        states(machine, sum(case.fresh), count, shape.head_dim, seed) for seed, count in enumerate(heads, 3)
    )
    scores = ScoreScaling(shape.head_dim**-0.5, case.logit_cap)
    read_as = torch.float32
    bounds = ExtendBounds(starts_of(case.fresh, machine), starts_of(case.lengths, machine), slots, max(case.fresh))
    if case.what == "prefill":
        chunk = JoinedChunk.of(bounds, len(q))
        read_as = machine.dtype
        joined = attention.read_prefix(q, *layer, bounds, chunk)
        assert joined is not None, "prefixes are worth reading back"
        for fresh, side in zip((k_new, v_new), joined, strict=True):
            side.index_copy_(0, chunk.fresh_places, fresh)
        most = (bounds.longest, chunk.longest)
        output = attended_in_turn(q, *joined, chunk.queries, chunk.ends, *most, scores.scale, torch.empty_like(q))
    else:
        output = attention.extend(q, k_new, v_new, *layer, bounds, scores)
    return error_of(output, exact(q, *layer, slots, case.lengths, scores, (case.fresh, k_new, v_new), read_as))


def _decode_error(case: Case, machine: Machine, attention: TritonAttention, layer: Layer, slots: Tensor) -> float:
    shape, indptr = case.shape, starts_of(case.lengths, machine)
    scores = ScoreScaling(shape.head_dim**-0.5, case.logit_cap)
    q = states(machine, len(case.lengths), shape.num_heads, shape.head_dim, 3)
    if case.what == "graph":
        output = replayed(machine, attention, q, layer, indptr, slots, scores)
    elif case.what == "baseline":
        output = baselines.by_dequantizing(machine, shape, *layer, len(q))(q, indptr, slots)
    elif case.num_splits is None:
        output = attention.decode(q, *layer, indptr, slots, scores)
    else:
        sides = launch.LayerSides(KernelSide.of(layer[0]), KernelSide.of(layer[1]))
        settings = Device.of(machine.device).launch(sides.keys, sides.values, shape.gqa)
        scratch, output = Scratch(1 << 22, machine.device), torch.empty_like(q)
        launch.decode(q, sides, indptr, slots, scores, settings, case.num_splits, scratch, output)
    return error_of(output, exact(q, *layer, slots, case.lengths, scores))


def run(machine: Machine) -> list[dict[str, Any]]:
    """Check all cases, several at once, as most of the time is the compiler's; a case that cannot run has failed."""
    listed: list[Case | LatentCase] = [*cases(smoke=machine.smoke), *latent_cases(smoke=machine.smoke)]
    deadline = time.monotonic() + LIMIT_S
    context = multiprocessing.get_context("spawn")
    rows = []
    pool = concurrent.futures.ProcessPoolExecutor(1 if machine.smoke else PROCESSES, mp_context=context)
    futures = [
        pool.submit(check_latents, case, str(machine.device))
        if isinstance(case, LatentCase)
        else pool.submit(check, case, str(machine.device))
        for case in listed
    ]
    for case, future in zip(listed, futures, strict=True):
        row: dict[str, Any] = {"case": case.name, "error": math.nan, "limit": case.limit, "passed": False}
        try:
            largest = future.result(max(0.0, deadline - time.monotonic()))
            row |= {"error": largest, "passed": largest <= case.limit}
        except TimeoutError:
            row |= {"why": "not checked, for want of time", "passed": None}
        except Exception as error:  # a compiler, a driver or a process that died may raise anything
            row["why"] = f"{type(error).__name__}: {error}".splitlines()[0]
        rows.append(row)
    pool.shutdown(wait=False, cancel_futures=True)
    for child in multiprocessing.active_children():
        child.terminate()  # Python would wait for one that hangs
    return rows


def _put_special_groups(*tensors: Tensor) -> None:
    """Put in groups that the quantizer has a rule for: NaN, infinity, zeros of both signs, tiny and equal values."""
    for x in tensors:
        x[1, 0, 3], x[2, 0, 5], x[3], x[4] = torch.nan, -torch.inf, 0.0, -0.0
        x[5] *= 1e-6
        x[6] = x[6, 0, 0]


def _misread(machine: Machine, side: PackedRows, slots: Tensor) -> float:
    out = torch.full((len(slots), *side.shape[1:]), torch.inf, device=machine.device, dtype=machine.dtype)
    launch.read(KernelSide.of(side), slots, torch.tensor([len(slots)], device=machine.device), out)
    expected = side.format.unpack(side.rows[slots].cpu(), torch.float32).to(machine.dtype)
    return share_that_differs(out.flatten(1), expected.flatten(1))
