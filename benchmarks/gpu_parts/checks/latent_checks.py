"""Checks the kernels of latents (MLA) against `quant.py` and float64, on this device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import torch

from gpu_parts.checks.oracle import error_of, exact_of_states, miswritten, replayed, share_that_differs, starts_of
from gpu_parts.machine import Machine
from gpu_parts.pools import ALL_TRANSFORMS, HeadShape, empty_rows, row_format, states
from kvtuner.precision import NATIVE_BITS, PACKED_BITS, Fit, num_slots
from kvtuner.runtime_loader.kernels.latents.triton_latents import TritonLatentAttention
from kvtuner.runtime_loader.packed_attention import ExtendBounds, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat

TOLERANCE: Final = 1e-2
"""The largest error, as a share of the norm: queries and weights are rounded to fp16 once, outputs to their dtype."""
CHANNELS, ROTARY_CHANNELS = 512, 64
"""The channels of a latent of DeepSeek, and those beside it."""
TINY_CHANNELS: Final = 64
SPARE_SLOTS: Final = 7


@dataclass(frozen=True, slots=True)
class LatentCase:
    """One operation on the latents of one layer.

    The operation `what` is store, read, decode, extend, prefix (read back as the host's kernel takes it) or graph.
    """

    what: str
    bits: int
    num_heads: int = 16
    channels: int = CHANNELS
    fit: Fit = "minmax"
    kind: str = ALL_TRANSFORMS
    lengths: tuple[int, ...] = (700, 0, 1, 64, 2300)
    fresh: tuple[int, ...] = (3, 20, 0, 1, 40)

    @property
    def name(self) -> str:
        """The case's name in the report."""
        fitted = " fitted" if self.fit == "least_squares" else ""
        return f"{self.what} latents K{self.bits}V{self.bits} {self.num_heads}x{self.channels} {self.kind}{fitted}"

    @property
    def limit(self) -> float:
        """The largest error that passes."""
        return TOLERANCE if self.what in ("decode", "extend", "graph") else 0.0


def latent_cases(*, smoke: bool) -> list[LatentCase]:
    """All cases: every width by every operation, and DeepSeek's 128 query heads."""
    if smoke:
        tiny = {"num_heads": 3, "channels": TINY_CHANNELS, "lengths": (20, 1), "fresh": (3, 9)}
        return [LatentCase(what, 4, **tiny) for what in ("store", "decode", "extend", "prefix")]  # type: ignore[arg-type]  # of one type each
    operations = ("store", "read", "prefix", "decode", "extend", "graph")
    listed = [LatentCase(what, bits) for what, bits in itertools.product(operations, PACKED_BITS)]
    listed += [LatentCase(what, NATIVE_BITS, kind="none") for what in ("decode", "extend")]
    listed += [LatentCase("store", bits, fit="least_squares") for bits in (2, 3, 4)]
    return listed + [LatentCase(what, 4, num_heads=heads) for what in ("decode", "extend") for heads in (8, 20, 128)]


def check_latents(case: LatentCase, device: str) -> float:
    """The error of a case: of a head's output or, where bits must be equal, the share of tokens that differ."""
    machine = Machine(torch.device(device), torch.float16 if device == "cpu" else torch.bfloat16)
    num_tokens = sum(case.lengths)
    group_size = max(128, case.channels // num_slots(case.bits)) if case.channels == CHANNELS else None
    shape = HeadShape("", 1, case.num_heads, case.channels, group_size)
    latents, rotary = layer = tuple(
        empty_rows(machine.device, machine.dtype, row, num_tokens + SPARE_SLOTS)
        for row in (row_format(shape, case.bits, case.kind, fit=case.fit), RowFormat(1, ROTARY_CHANNELS, None))
    )
    for side in layer:  # bytes of 255 read as NaN
        side.rows.fill_(torch.nan if side.format.spec is None else 255)
    slots = torch.randperm(num_tokens + SPARE_SLOTS, device=machine.device)[:num_tokens]
    k, v = (
        states(machine, num_tokens, 1, size, seed) + 1.0
        for seed, size in enumerate((case.channels, ROTARY_CHANNELS), 1)
    )
    attention = TritonLatentAttention(machine.device)
    attention.store(latents, rotary, slots, k, v)
    if case.what == "store":
        return miswritten(latents, slots, k)
    if case.what == "read":
        wanted = latents.format.unpack(latents.rows[slots].cpu(), torch.float32).to(machine.dtype)
        return share_that_differs(attention.read(latents, slots, machine.dtype).flatten(1), wanted.flatten(1))
    k, v = (side.read(slots, torch.float32).double() for side in layer)
    q_dim = case.channels + ROTARY_CHANNELS
    scores = ScoreScaling(q_dim**-0.5)
    both = torch.cat((k, v), dim=-1)
    indptr = starts_of(case.lengths, machine)
    if case.what in ("decode", "graph"):
        q = states(machine, len(case.lengths), case.num_heads, q_dim, 3)
        if case.what == "graph":
            output = replayed(machine, attention, q, (latents, rotary), indptr, slots, scores)
        else:
            output = attention.decode(q, latents, rotary, indptr, slots, scores)
        return error_of(output, exact_of_states(q, both, k, case.lengths, scores))
    q = states(machine, sum(case.fresh), case.num_heads, q_dim, 3)
    longest = max(case.fresh) if case.what == "extend" else 1 << 14  # enough to be worth reading back
    bounds = ExtendBounds(starts_of(case.fresh, machine), indptr, slots, longest)
    if case.what == "prefix":
        found = attention.read_prefix(q, latents, rotary, bounds)
        assert found is not None, "prefixes are worth reading back"
        return share_that_differs(found[0].flatten(1), both.to(machine.dtype).flatten(1))
    new_k, new_v = (
        states(machine, len(q), 1, size, seed) for seed, size in enumerate((case.channels, ROTARY_CHANNELS), 4)
    )
    output = attention.extend(q, new_k, new_v, latents, rotary, bounds, scores)
    fresh = (case.fresh, torch.cat((new_k, new_v), dim=-1), new_k)
    return error_of(output, exact_of_states(q, both, k, case.lengths, scores, fresh))
