"""Every kernel against `quant.py` and float64, on the device at hand."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from gpu_parts.machine import Machine
from gpu_parts.pools import Shape, empty_rows, row_format, states
from kvtuner.precision import PrecisionPair
from kvtuner.quant import KEY_TRANSFORMS
from kvtuner.runtime_loader.kernels import launch
from kvtuner.runtime_loader.kernels.attention import TritonAttention
from kvtuner.runtime_loader.kernels.scratch import Scratch
from kvtuner.runtime_loader.kernels.settings import Device
from kvtuner.runtime_loader.kernels.side import KernelSide
from kvtuner.runtime_loader.packed_attention import ExtendBounds, Scores

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import StoredRows

FULL: Final = "centered+balanced+hadamard"
TOLERANCE: Final = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 1e-2}
"""Of the norm: queries and weights over rows are rounded to fp16 once, outputs to their dtype."""
PROCESSES: Final = 8


@dataclass(frozen=True, slots=True)
class Case:
    """One layer, one way to read it."""

    what: str
    pair: PrecisionPair
    shape: Shape
    kind: str = FULL
    logit_cap: float = 0.0
    lengths: tuple[int, ...] = (700, 1, 64, 2300)
    fresh: tuple[int, ...] = (3, 20, 1, 40)
    num_splits: int | None = None
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """For the report."""
        parts = [self.what, str(self.pair), f"{self.shape.num_kv_heads}x{self.shape.gqa}x{self.shape.head_dim}"]
        parts += [self.kind] if self.kind != "none" else []
        parts += [f"cap {self.logit_cap:g}"] if self.logit_cap else []
        parts += [f"{sum(self.lengths)} tokens"] if len(self.lengths) == 1 else []
        parts += [str(self.dtype).removeprefix("torch.")] if self.dtype else []
        return " ".join(parts)


def cases(*, smoke: bool) -> list[Case]:
    """All that is checked: every pair, transform and shape, though not all of their products."""
    if smoke:
        shape, lengths = Shape("", 1, 2, 64), (20, 1)
        whats = ("store", "read", "decode", "extend", "graph")
        return [Case(what, PrecisionPair(4, 8), shape, lengths=lengths, fresh=(3, 9)) for what in whats]
    shape = Shape("", 4, 4, 128)
    pairs = [PrecisionPair(*bits) for bits in itertools.product((2, 4, 8, 16), repeat=2)]
    found = [Case("decode", pair, shape) for pair in pairs]
    found += [Case("decode", PrecisionPair(4, 4), shape, kind) for kind in KEY_TRANSFORMS]
    found += [
        Case(what, PrecisionPair(*bits), Shape("", heads, gqa, head_dim), logit_cap=cap)
        for what in ("decode", "extend")
        for heads, gqa, head_dim, cap in ((2, 7, 64, 0.0), (3, 1, 80, 5.0), (2, 2, 96, 0.0), (1, 20, 256, 5.0))
        for bits in ((4, 2), (8, 4))
    ]
    # The offset of 1024 must cancel over a long split; two of the halves have one.
    found += [
        Case("decode", PrecisionPair(bits, bits), Shape("", 1, 4, 128), "none", lengths=(131072,), num_splits=1)
        for bits in (2, 4, 8)
    ]
    found += [Case("decode", PrecisionPair(4, 4), shape, dtype=torch.float16)]
    found += [Case("extend", PrecisionPair(*bits), shape) for bits in ((4, 4), (8, 4), (16, 16), (2, 16))]
    found += [Case("graph", PrecisionPair(*bits), shape) for bits in ((4, 4), (8, 2))]
    sides = [*((pair, shape, FULL) for pair in pairs if pair.k_bits != pair.v_bits)]
    sides += [(PrecisionPair(4, 8), Shape("", 3, 1, head_dim), kind) for head_dim in (64, 80, 96, 256)
              for kind in ("none", FULL)]  # fmt: skip
    return found + [Case(what, *side) for what in ("store", "read") for side in sides]


def check(case: Case, device: str) -> float:
    """Error of one case: of the norm or, where bits must be equal, the share of rows that differ."""
    machine = Machine(torch.device(device), case.dtype or (torch.float16 if device == "cpu" else torch.bfloat16))
    shape, lengths = case.shape, case.lengths
    num_tokens = sum(lengths)
    forms = (
        row_format(shape, case.pair.k_bits, case.kind),
        row_format(shape, case.pair.v_bits, "hadamard" if "hadamard" in case.kind else "none"),
    )
    keys, values = (empty_rows(machine, form, num_tokens + 7) for form in forms)
    for side in (keys, values):  # rows that nobody wrote are NaN
        side.rows.fill_(torch.nan if side.format.spec is None else 255)
    k, v = (states(machine, num_tokens, shape.num_kv_heads, shape.head_dim, seed) for seed in (1, 2))
    k, v = k + 1.0, v * 3.0
    slots = torch.randperm(num_tokens + 7, device=machine.device)[:num_tokens]
    attention = TritonAttention(machine.device)
    attention.store(keys, values, slots, k, v)
    if case.what == "store":
        wrong = [
            (_written(side, side.rows[slots].cpu()) != _written(side, side.format.pack(fresh.cpu()))).any(1)
            for side, fresh in ((keys, k), (values, v))
        ]
        return max(each.double().mean().item() for each in wrong)
    if case.what == "read":
        return max(_misread(machine, side, slots) for side in (keys, values))
    indptr = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=machine.device)
    scores = Scores(shape.head_dim**-0.5, case.logit_cap)
    if case.what == "extend":
        q, k_new, v_new = (
            states(machine, sum(case.fresh), heads, shape.head_dim, seed)
            for heads, seed in ((shape.num_heads, 3), (shape.num_kv_heads, 4), (shape.num_kv_heads, 5))
        )
        tokens = torch.tensor([0, *itertools.accumulate(case.fresh)], dtype=torch.int32, device=machine.device)
        bounds = ExtendBounds(tokens, indptr, slots, max(case.fresh))
        found = attention.extend(q, k_new, v_new, keys, values, bounds, scores)
        wanted = _exact(q, keys, values, slots, lengths, scores, (case.fresh, k_new, v_new))
        return _error(found, wanted)
    q = states(machine, len(lengths), shape.num_heads, shape.head_dim, 3)
    if case.what == "graph":
        return _replayed(machine, attention, q, keys, values, indptr, slots, scores)
    if case.num_splits is None:
        found = attention.decode(q, keys, values, indptr, slots, scores)
    else:
        sides = KernelSide.of(keys), KernelSide.of(values)
        settings = Device.of(machine.device).launch(*sides, shape.gqa)
        scratch, found = Scratch(1 << 22, machine.device), torch.empty_like(q)
        launch.decode(
            q, *sides, indptr, slots, scores, settings, case.num_splits, scratch, found
        )  # fmt: skip
    return _error(found, _exact(q, keys, values, slots, lengths, scores))


def run(machine: Machine) -> list[dict[str, Any]]:
    """Check everything, several cases at once: most of the time is the compiler's."""
    found, device = [], str(machine.device)
    listed = cases(smoke=machine.smoke)
    if machine.smoke:
        errors = [check(case, device) for case in listed]
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
            errors = list(pool.map(check, listed, itertools.repeat(device)))
    for case, error in zip(listed, errors, strict=True):
        limit = 0.0 if case.what in ("store", "read") else TOLERANCE[case.dtype or machine.dtype]
        found.append({"case": case.name, "error": error, "limit": limit, "passed": error <= limit})
    return found


def _written(side: StoredRows, rows: Tensor) -> Tensor:
    """Rows without what pads them, which nobody writes."""
    form = side.format
    if form.spec is None:
        return rows.flatten(1)
    groups = form.num_heads * form.head_dim // (form.spec.group_size or form.head_dim)
    return rows[:, : form.num_heads * form.head_dim * form.bits // 8 + 4 * groups]


def _misread(machine: Machine, side: StoredRows, slots: Tensor) -> float:
    out = torch.full((len(slots), *side.shape[1:]), torch.nan, device=machine.device, dtype=machine.dtype)
    count = torch.tensor([len(slots)], device=machine.device)
    launch.read(KernelSide.of(side), slots, count, out)
    wanted = side.format.unpack(side.rows[slots].cpu(), torch.float32).to(machine.dtype)
    return (out.cpu() != wanted).flatten(1).any(1).double().mean().item()


def _exact(
    q: Tensor, keys: StoredRows, values: StoredRows, slots: Tensor, lengths: tuple[int, ...], scores: Scores,
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
        weights = scores(products).masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v_of.repeat_interleave(gqa, 1)))
        first, begin = first + length, begin + count
    return torch.cat(outputs)


def _replayed(
    machine: Machine, attention: TritonAttention, q: Tensor, keys: StoredRows, values: StoredRows, indptr: Tensor,
    slots: Tensor, scores: Scores,
) -> float:  # fmt: skip
    """A graph captured with requests of one token, replayed with those at hand."""
    attention.prepare([(keys, values)], q.shape[1], len(q))
    q_in, indptr_in, slots_in = torch.zeros_like(q), torch.arange(len(indptr), dtype=torch.int32), slots.clone()
    indptr_in = indptr_in.to(machine.device)
    if machine.smoke:
        out = attention.decode(q, keys, values, indptr, slots, scores)
    else:
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
    lengths = tuple((indptr[1:] - indptr[:-1]).tolist())
    return _error(out, _exact(q, keys, values, slots, lengths, scores))


def _error(found: Tensor, wanted: Tensor) -> float:
    """Of the norm; NaN, which is never within a limit, where there is one."""
    difference: float = ((found.double() - wanted).norm() / wanted.norm()).item()
    return difference
