"""Every kernel against `quant.py` and float64, on the device at hand."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import multiprocessing
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from gpu_parts import baselines
from gpu_parts.machine import Machine
from gpu_parts.pools import Shape, empty_rows, row_format, states
from kvtuner.precision import PrecisionPair
from kvtuner.runtime_loader.kernels import launch
from kvtuner.runtime_loader.kernels.scratch import Scratch
from kvtuner.runtime_loader.kernels.settings import Device
from kvtuner.runtime_loader.kernels.side import KernelSide
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import ExtendBounds, ScoreScaling
from kvtuner.transforms import candidate_transforms

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import PackedRows

FULL: Final = "centered+balanced+hadamard"
TOLERANCE: Final = 1e-2
"""Of the norm: queries and weights over rows are rounded to fp16 once, outputs to their dtype."""
BASELINE_TOLERANCE: Final = 4e-2
"""Of the kernel that ours is compared with: it rounds keys, values and weights to bf16."""
PROCESSES: Final = 8
LIMIT_S: Final = 200
SPARE_SLOTS: Final = 7


@dataclass(frozen=True, slots=True)
class Case:
    """One layer, one way to read it.

    Attributes:
        what: store, read, decode, extend, graph (decode, captured and replayed), or the baseline kernel.
        pair: of widths.
        shape: of heads.
        kind: of key transform; values are rotated where keys are.
        group_size: channels of a scale; None for a head's.
        symmetric: the kind of grid.
        logit_cap: of scores; 0 for none.
        lengths: tokens in the pool, by request.
        fresh: new tokens, by request.
        num_splits: instead of what fills the device.
        dtype: instead of the machine's.
    """

    what: str
    pair: PrecisionPair
    shape: Shape
    kind: str = FULL
    group_size: int | None = None
    symmetric: bool = False
    logit_cap: float = 0.0
    lengths: tuple[int, ...] = (700, 0, 1, 64, 2300)
    fresh: tuple[int, ...] = (3, 20, 0, 1, 40)
    num_splits: int | None = None
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """For the report."""
        parts = [self.what, str(self.pair), f"{self.shape.num_kv_heads}x{self.shape.gqa}x{self.shape.head_dim}"]
        parts += [self.kind] if self.kind != "none" else []
        parts += [f"groups of {self.group_size}"] if self.group_size else []
        parts += ["symmetric"] if self.symmetric else []
        parts += [f"cap {self.logit_cap:g}"] if self.logit_cap else []
        parts += [f"{sum(self.lengths)} tokens"] if len(self.lengths) == 1 else []
        parts += [str(self.dtype).removeprefix("torch.")] if self.dtype else []
        return " ".join(parts)

    @property
    def limit(self) -> float:
        """Of its error."""
        if self.what in ("store", "read"):
            return 0.0
        return BASELINE_TOLERANCE if self.what == "baseline" else TOLERANCE


def cases(*, smoke: bool) -> list[Case]:
    """All that is checked: every pair, transform and shape, though not all of their products."""
    if smoke:
        pair, shape = PrecisionPair(4, 8), Shape("", 1, 2, 64)
        # Not the baseline: it multiplies bf16, which Triton's interpreter does wrongly.
        whats = ("store", "read", "decode", "extend", "graph")
        return [Case(what, pair, shape, lengths=(20, 1), fresh=(3, 9)) for what in whats]
    shape = Shape("", 4, 4, 128)
    pairs = [PrecisionPair(*bits) for bits in itertools.product((2, 4, 8, 16), repeat=2)]
    four = PrecisionPair(4, 4)
    found = [Case("decode", pair, shape) for pair in pairs]
    found += [Case("decode", four, shape, kind) for kind in candidate_transforms("k")]
    found += [
        Case(what, PrecisionPair(*bits), Shape("", heads, gqa, head_dim), logit_cap=cap)
        for what in ("decode", "extend")
        for heads, gqa, head_dim, cap in ((2, 7, 64, 0.0), (3, 1, 80, 5.0), (2, 2, 96, 0.0), (1, 20, 256, 5.0))
        for bits in ((4, 2), (8, 4))
    ]
    found += [
        Case("decode", PrecisionPair(bits, bits), Shape("", 1, 4, 128), "none", lengths=(131072,), num_splits=16)
        for bits in (2, 4, 8)
    ]
    found += [
        Case(what, PrecisionPair(bits, bits), shape, "none", 64, symmetric)
        for what in ("decode", "store", "read")
        for bits in (2, 4, 8)
        for symmetric in (False, True)
    ]
    found += [Case("decode", four, shape, lengths=(300,) * 1100)]
    found += [Case("decode", four, shape, dtype=torch.float16), Case("baseline", four, shape, "none")]
    found += [Case("extend", PrecisionPair(*bits), shape) for bits in ((4, 4), (8, 4), (16, 16), (2, 16))]
    found += [Case("graph", PrecisionPair(*bits), shape) for bits in ((4, 4), (8, 2))]
    sides = [(pair, shape, FULL) for pair in pairs if pair.k_bits != pair.v_bits]
    sides += [(four, shape, kind) for kind in candidate_transforms("k")]
    sides += [
        (PrecisionPair(4, 8), Shape("", 3, 1, head_dim), kind)
        for head_dim in (64, 80, 96, 256)
        for kind in ("none", FULL)
    ]
    return found + [Case(what, *side) for what in ("store", "read") for side in sides]


def check(case: Case, device: str) -> float:
    """Error of one case: of a head's output or, where bits must be equal, the share of tokens that differ."""
    machine = Machine(torch.device(device), case.dtype or (torch.float16 if device == "cpu" else torch.bfloat16))
    shape, lengths = case.shape, case.lengths
    num_tokens = sum(lengths)
    v_kind = "hadamard" if "hadamard" in case.kind else "none"
    keys, values = (
        empty_rows(
            machine, row_format(shape, bits, kind, case.group_size, symmetric=case.symmetric), num_tokens + SPARE_SLOTS
        )
        for bits, kind in ((case.pair.k_bits, case.kind), (case.pair.v_bits, v_kind))
    )
    unwritten = 0 if case.what == "baseline" else 255  # NaN, which the baseline does not keep from its sums
    for side in (keys, values):
        side.rows.fill_(torch.nan if side.format.spec is None else unwritten)
    k, v = (states(machine, num_tokens, shape.num_kv_heads, shape.head_dim, seed) for seed in (1, 2))
    k, v = k + 1.0, v * 3.0
    if case.what in ("store", "read"):
        _make_hard(k)
        _make_hard(v)
    slots = torch.randperm(num_tokens + SPARE_SLOTS, device=machine.device)[:num_tokens]
    attention = TritonAttention(machine.device)
    attention.store(keys, values, slots, k, v)
    if case.what == "store":
        sides = ((keys, k), (values, v))
        wrong = [
            _differ(_written(side, side.rows[slots]), _written(side, side.format.pack(x.cpu()))) for side, x in sides
        ]
        return max(wrong)
    if case.what == "read":
        return max(_misread(machine, side, slots) for side in (keys, values))
    indptr = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=machine.device)
    scores = ScoreScaling(shape.head_dim**-0.5, case.logit_cap)
    if case.what == "extend":
        q, k_new, v_new = (
            states(machine, sum(case.fresh), heads, shape.head_dim, seed)
            for heads, seed in ((shape.num_heads, 3), (shape.num_kv_heads, 4), (shape.num_kv_heads, 5))
        )
        tokens = torch.tensor([0, *itertools.accumulate(case.fresh)], dtype=torch.int32, device=machine.device)
        bounds = ExtendBounds(tokens, indptr, slots, max(case.fresh))
        found = attention.extend(q, k_new, v_new, keys, values, bounds, scores)
        return error_of(found, exact(q, keys, values, slots, lengths, scores, (case.fresh, k_new, v_new)))
    q = states(machine, len(lengths), shape.num_heads, shape.head_dim, 3)
    if case.what == "graph":
        found = _replayed(machine, attention, q, keys, values, indptr, slots, scores)
    elif case.what == "baseline":
        found = baselines.by_dequantizing(machine, shape, keys, values, len(q))(q, indptr, slots)
    elif case.num_splits is None:
        found = attention.decode(q, keys, values, indptr, slots, scores)
    else:
        sides = KernelSide.of(keys), KernelSide.of(values)
        settings = Device.of(machine.device).launch(*sides, shape.gqa)
        scratch, found = Scratch(1 << 22, machine.device), torch.empty_like(q)
        launch.decode(q, *sides, indptr, slots, scores, settings, case.num_splits, scratch, found)
    return error_of(found, exact(q, keys, values, slots, lengths, scores))


def run(machine: Machine) -> list[dict[str, Any]]:
    """Check everything, several cases at once: most of the time is the compiler's.

    A case that cannot be run has failed, and says why.
    """
    listed = cases(smoke=machine.smoke)
    deadline = time.monotonic() + LIMIT_S
    context = multiprocessing.get_context("spawn")
    rows = []
    pool = concurrent.futures.ProcessPoolExecutor(1 if machine.smoke else PROCESSES, mp_context=context)
    futures = [pool.submit(check, case, str(machine.device)) for case in listed]
    for case, future in zip(listed, futures, strict=True):
        row = {"case": case.name, "error": math.nan, "limit": case.limit, "passed": False}
        try:
            row["error"] = future.result(max(0.0, deadline - time.monotonic()))
            row["passed"] = row["error"] <= case.limit
        except TimeoutError:
            row |= {"why": "not checked, for want of time", "passed": None}
        except Exception as error:  # of a compiler, a driver or a process that died
            row["why"] = f"{type(error).__name__}: {error}".splitlines()[0]
        rows.append(row)
    pool.shutdown(wait=False, cancel_futures=True)
    for child in multiprocessing.active_children():
        child.terminate()  # one that hangs would be waited for at the end
    return rows


def _make_hard(x: Tensor) -> None:
    """Groups that have a rule of their own."""
    x[1, 0, 3], x[2, 0, 5], x[3], x[4] = torch.nan, -torch.inf, 0.0, -0.0
    x[5] *= 1e-6
    x[6] = x[6, 0, 0]


def _differ(found: Tensor, wanted: Tensor) -> float:
    """Share of tokens."""
    found, wanted = found.cpu(), wanted.cpu()
    return (~torch.isclose(found, wanted, rtol=0, atol=0, equal_nan=True)).any(1).double().mean().item()


def _written(side: PackedRows, rows: Tensor) -> Tensor:
    """Rows without what pads them, which nobody writes."""
    form = side.format
    if form.spec is None:
        return rows.flatten(1)
    groups = form.num_heads * form.head_dim // (form.spec.group_size or form.head_dim)
    return rows[:, : form.num_heads * form.head_dim * form.bits // 8 + 4 * groups]


def _misread(machine: Machine, side: PackedRows, slots: Tensor) -> float:
    out = torch.full((len(slots), *side.shape[1:]), torch.inf, device=machine.device, dtype=machine.dtype)
    launch.read(KernelSide.of(side), slots, torch.tensor([len(slots)], device=machine.device), out)
    wanted = side.format.unpack(side.rows[slots].cpu(), torch.float32).to(machine.dtype)
    return _differ(out.flatten(1), wanted.flatten(1))


def exact(
    q: Tensor, keys: PackedRows, values: PackedRows, slots: Tensor, lengths: tuple[int, ...], scores: ScoreScaling,
    fresh: tuple[tuple[int, ...], Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Attention in float64 over what rows read as, and over new tokens, causally."""
    k, v = (side.read(slots, torch.float32).double() for side in (keys, values))
    counts = (1,) * len(lengths) if fresh is None else fresh[0]
    outputs, first, begin = [], 0, 0
    for length, count in zip(lengths, counts, strict=True):
        k_of, v_of = k[first : first + length], v[first : first + length]
        if fresh is not None:
            k_of = torch.cat((k_of, fresh[1][begin : begin + count].double()))
            v_of = torch.cat((v_of, fresh[2][begin : begin + count].double()))
        gqa = q.shape[1] // k.shape[1]
        products = torch.einsum("qhd,khd->hqk", q[begin : begin + count].double(), k_of.repeat_interleave(gqa, 1))
        hidden = torch.ones(products.shape[1:], dtype=torch.bool, device=q.device).triu(1 + len(k_of) - count)
        weights = scores(products).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)  # of no token: zeros
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v_of.repeat_interleave(gqa, 1)))
        first, begin = first + length, begin + count
    return torch.cat(outputs)


def _replayed(
    machine: Machine, attention: TritonAttention, q: Tensor, keys: PackedRows, values: PackedRows, indptr: Tensor,
    slots: Tensor, scores: ScoreScaling,
) -> Tensor:  # fmt: skip
    """A graph captured with requests of one token, replayed with those at hand."""
    attention.prepare([(keys, values)], q.shape[1], len(q))
    q_in, indptr_in, slots_in = torch.zeros_like(q), torch.arange(len(indptr), dtype=torch.int32), slots.clone()
    indptr_in = indptr_in.to(machine.device)
    if machine.smoke:
        return attention.decode(q, keys, values, indptr, slots, scores)
    attention.decode(q_in, keys, values, indptr_in, slots_in, scores)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.decode(q_in, keys, values, indptr_in, slots_in, scores)
    q_in.copy_(q)
    indptr_in.copy_(indptr)
    slots_in.copy_(slots)
    graph.replay()
    torch.cuda.synchronize()
    return out


def error_of(found: Tensor, wanted: Tensor) -> float:
    """The largest of a query's head, of its norm; NaN, which is never within a limit, where there is one."""
    difference, size = (found.double() - wanted).norm(dim=-1), wanted.norm(dim=-1)
    return torch.where(size > 0, difference / size.clamp(min=1e-30), difference).max().item()
