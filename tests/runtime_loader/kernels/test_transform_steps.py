"""Kernels take the steps of any transform in its own order, and refuse a step that they do not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kvtuner.errors import PrecisionError
from kvtuner.quant import STEPS
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.launch import read
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import ScoreScaling
from kvtuner.transforms import TRANSFORMS, TransformKind

if TYPE_CHECKING:
    from fixture_types import MakePoisoned, MakeRowFormat

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TOKENS = 20


@pytest.mark.parametrize("name", ["balanced+hadamard", "hadamard+balanced", "centered+hadamard+balanced+hadamard"])
def test_steps_are_taken_in_the_order_of_the_transform(
    name: str, row_format: MakeRowFormat, poisoned: MakePoisoned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRANSFORMS, name, TransformKind(name, "?"))
    monkeypatch.setitem(TRANSFORMS, "hadamard+hadamard", TransformKind("hadamard+hadamard", "!", has_values=True))
    keys, values, k_expected, v_expected = (
        poisoned(row_format(1, 80, 8, kind), TOKENS) for kind in 2 * (name, "hadamard+hadamard")
    )
    generator = torch.Generator().manual_seed(6)
    k, v = (torch.randn(TOKENS, 1, 80, generator=generator) for _ in range(2))
    slots, attention = torch.randperm(TOKENS, generator=generator), TritonAttention(torch.device("cpu"))
    attention.store(keys, values, slots, k, v)
    for stored, expected, states in ((keys, k_expected, k), (values, v_expected, v)):
        expected.write(slots, states)
        assert torch.equal(stored.rows[:, :84], expected.rows[:, :84]), "80 codes and a scale word"
        back = torch.empty(TOKENS, 1, 80)
        read(KernelSide.of(stored), slots, torch.tensor([TOKENS]), back)
        assert torch.equal(back, expected.read(slots, torch.float32))

    q = torch.randn(1, 3, 80, generator=generator)
    found = attention.decode(q, keys, values, torch.tensor([0, TOKENS]), slots, ScoreScaling(0.1))[0]
    k_read, v_read = (stored.read(slots, torch.float32)[:, 0].double() for stored in (keys, values))
    exact = torch.softmax(0.1 * q[0].double() @ k_read.T, dim=-1) @ v_read
    assert (found - exact).abs().max() < 1e-2 * exact.abs().max()


def test_a_step_that_kernels_do_not_have_is_refused_by_name(
    row_format: MakeRowFormat, poisoned: MakePoisoned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STEPS, "unheard", STEPS["hadamard"])
    monkeypatch.setitem(TRANSFORMS, "hadamard+unheard", TransformKind("hadamard+unheard", "?"))
    with pytest.raises(PrecisionError, match=r"no step 'unheard' of transform hadamard\+unheard"):
        KernelSide.of(poisoned(row_format(1, 64, 4, "hadamard+unheard"), 3))
