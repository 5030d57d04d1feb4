"""What tensor cores drop of a sum does not add up over the tokens of a split."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from kvtuner.precision import PACKED_BITS, num_slots
from kvtuner.runtime_loader.kernels import launch
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.launch_settings import INTERPRETED
from kvtuner.runtime_loader.kernels.scratch import Scratch
from kvtuner.runtime_loader.packed_attention import ScoreScaling
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    from fixture_types import MakePoisoned, MakeRowFormat

NUM_TOKENS = 131_072
SPLITS = [pytest.param(16_384, marks=pytest.mark.slow), pytest.param(NUM_TOKENS, marks=pytest.mark.full)]
"""The tokens of the one split that the kernel reads."""
STEPS = {"Hopper": 16, "Ampere": 8}
"""The products that a tensor core adds to its accumulator at once (Fasi et al., PeerJ CS 2021)."""


def truncated_product(a: Any, b: Any, sums: Any, step: int) -> Any:
    """A matrix product, added to `sums` [rows, columns] by an accumulator that drops bits.

    Each step shifts its products and the accumulator to the exponent of the largest, cuts off what lies below the 24
    bits of a float32, and adds the rest.
    """
    sums = sums.astype(np.float64)
    for start in range(0, a.shape[1], step):
        products = a[:, start : start + step, None].astype(np.float64) * b[None, start : start + step].astype(
            np.float64
        )
        terms = np.concatenate([products, sums[:, None]], axis=1)  # [rows, step + 1, columns]
        _, exponents = np.frexp(np.abs(terms).max(axis=1, keepdims=True))
        units = np.ldexp(1.0, exponents - 24)
        sums = (np.trunc(terms / units) * units).sum(axis=1).astype(np.float32).astype(np.float64)
    return sums


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_emulated_accumulator_loses_what_a_split_of_this_length_may_not_lose(step: int) -> None:
    rng = np.random.default_rng(0)
    codes, weights = rng.integers(0, 16, (4, NUM_TOKENS)), rng.random((NUM_TOKENS, 1)).astype(np.float16)
    sums = truncated_product(codes, weights, np.zeros((4, 1)), step)
    exact = codes @ weights.astype(np.float64)
    assert (exact - sums > 5e-4 * exact).all()  # of which far more is left where values cancel


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("num_tokens", SPLITS)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("bits", PACKED_BITS)
def test_a_long_split_loses_nothing(
    step: int,
    bits: int,
    num_tokens: int,
    row_format: MakeRowFormat,
    poisoned: MakePoisoned,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, values = (poisoned(row_format(1, 16 * num_slots(bits), bits), num_tokens) for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    slots, head_dim = torch.arange(num_tokens), keys.format.head_dim
    for stored in (keys, values):
        stored.write(slots, torch.randn(num_tokens, 1, head_dim, generator=generator))
    q, indptr = torch.randn(1, 2, head_dim, generator=generator), torch.tensor([0, num_tokens])
    scores = ScoreScaling(0.3 * head_dim**-0.5)
    expected = TorchAttention().decode(q, keys, values, indptr, slots, scores)

    def create_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        sums = truncated_product(a.data, b.data, d.data, step).astype(d.data.dtype)
        return interpreter.TensorHandle(sums, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    out = torch.full_like(q, torch.nan)
    layer, settings = launch.LayerSides(KernelSide.of(keys), KernelSide.of(values)), replace(INTERPRETED, tokens=256)
    launch.decode(q, layer, indptr, slots, scores, settings, 1, Scratch(1 << 20, q.device), out)
    assert (out - expected).abs().max() < 2e-3 * expected.abs().max()  # the rounding of queries and weights
