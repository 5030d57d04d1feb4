"""What kernels are compared with on a GPU: attention in float64 over rows as the kernel is given them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from gpu_parts import correct
from gpu_parts.checks import oracle
from gpu_parts.machine import Machine
from gpu_parts.pools import empty_layer, keys_and_values, states

from kvtuner.runtime_loader.packed_attention import ScoreScaling


@pytest.mark.parametrize(("pair", "is_beyond"), [("K2V2", True), ("K8V8", False)])
def test_prefixes_that_are_read_back_are_compared_as_they_are_rounded(pair: str, is_beyond: bool) -> None:
    """Rounding keys of 2 bits to bf16 moves an output by more than the limit, which a right kernel failed on a GPU."""
    machine = Machine(torch.device("cpu"), torch.bfloat16)
    (case,) = (case for case in correct.cases(smoke=False) if case.what == "prefill" and str(case.pair) == pair)
    layer = empty_layer(machine, case.shape, case.pair, sum(case.lengths), case.kind)
    slots = torch.arange(sum(case.lengths))
    k, v = keys_and_values(machine, case.shape, len(slots))
    for side, x in zip(layer, (k + 1.0, v * 3.0), strict=True):
        side.write(slots, x)
    heads = (case.shape.num_heads, case.shape.num_kv_heads, case.shape.num_kv_heads)
    q, *fresh = (
        states(machine, sum(case.fresh), count, case.shape.head_dim, seed) for seed, count in enumerate(heads, 3)
    )
    given = (q, *layer, slots, case.lengths, ScoreScaling(case.shape.head_dim**-0.5), (case.fresh, *fresh))
    stored, rounded = oracle.exact(*given), oracle.exact(*given, machine.dtype)
    assert 0 < oracle.error_of(rounded, stored) < 2 * case.limit
    assert (oracle.error_of(rounded, stored) > case.limit) == is_beyond
