"""The library stores the bytes of `quant.py`, whatever it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hostile_groups import hostile_groups

from kvtuner.errors import CacheError, PrecisionError
from kvtuner.precision import PACKED_BITS, num_slots
from kvtuner.quant import STEPS, QuantSpec, Step, Transform
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.transforms import TransformKind, candidate_transforms

if TYPE_CHECKING:
    from fixture_types import MakePoisoned, MakeRowFormat

    from kvtuner.precision import Fit, WordBits
    from kvtuner.runtime_loader.cpu.native_attention import NativeAttention
    from kvtuner.runtime_loader.packed_attention import PackedRows


def hostile_states(heads: int, channels: int) -> torch.Tensor:
    """Every kind of group in every head, and groups with NaN and infinity."""
    groups = hostile_groups(channels)[:, 0]
    states = torch.stack([groups.roll(head, 0) for head in range(heads)], dim=1)
    states[3, 0, 1], states[4, -1, 2], states[5, 0, 0] = torch.nan, -torch.inf, torch.inf
    states[6] = -0.0
    return states


def assert_stored(native: NativeAttention, stored: PackedRows, states: torch.Tensor) -> None:
    """Tokens in slots out of order, half of which nobody writes."""
    order = torch.randperm(2 * len(states), generator=torch.Generator().manual_seed(1))
    slots, others = order.split(len(states))
    before = stored.rows[others].clone()
    native.store(stored, stored, slots, states, states)
    assert torch.equal(stored.rows[slots], stored.format.pack(states))
    assert torch.equal(stored.rows[others], before)


@pytest.mark.parametrize("word_bits", [32, 16])
@pytest.mark.parametrize("fit", ["minmax", "least_squares"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", PACKED_BITS)
def test_rows_of_hostile_groups_are_those_of_quant(
    native: NativeAttention, bits: int, symmetric: bool, fit: Fit, word_bits: WordBits, row_format: MakeRowFormat,
    poisoned: MakePoisoned,
) -> None:  # fmt: skip
    for channels, groups in ((128, 1), (80, 1), (256, 2), (64, num_slots(bits))):
        states = hostile_states(3, channels)
        stored = row_format(3, channels, bits, "none", channels // groups, symmetric, fit, word_bits)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert_stored(native, poisoned(stored, 2 * len(states)), states.to(dtype))


@pytest.mark.parametrize("kind", candidate_transforms("k"))
@pytest.mark.parametrize("channels", [96, 128])
def test_rows_of_every_transform_are_those_of_quant(
    native: NativeAttention, channels: int, kind: str, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    states = hostile_states(2, channels)
    stored = poisoned(row_format(2, channels, 4, kind, None, fit="least_squares"), 2 * len(states))
    assert_stored(native, stored, states.bfloat16())


def test_a_transform_that_the_library_does_not_have_is_applied_before(
    native: NativeAttention, monkeypatch: pytest.MonkeyPatch, poisoned: MakePoisoned
) -> None:
    monkeypatch.setitem(STEPS, "flipped", Step(lambda x, _: -x, lambda x, _: -x, lambda q, _: -q))
    spec = QuantSpec(4, Transform(TransformKind("flipped+hadamard", "f", has_values=True)))
    states = hostile_states(2, 64)
    assert_stored(native, poisoned(RowFormat(2, 64, spec), 2 * len(states)), states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_16_bits_are_copied(
    native: NativeAttention, dtype: torch.dtype, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    keys, values = (poisoned(row_format(2, 40, 16), 5, dtype) for _ in range(2))
    k, v = torch.randn(2, 3, 2, 40, generator=torch.Generator().manual_seed(0))
    native.store(keys, values, torch.tensor([4, 0, 2], dtype=torch.int32), k, v)
    assert torch.equal(keys.rows[[4, 0, 2]], k.to(dtype)) and torch.equal(values.rows[[4, 0, 2]], v.to(dtype))


def test_states_are_read_by_their_strides_on_two_threads_as_on_one(
    native: NativeAttention, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    stored = poisoned(row_format(2, 64, 4, "hadamard"), 200)
    states = torch.randn(100, 5, 64, generator=torch.Generator().manual_seed(0))[:, 1:3]
    torch.set_num_threads(2)
    assert_stored(native, stored, states)


@pytest.mark.parametrize("slot", [-1, 4])
def test_slots_outside_of_the_pool_are_refused(
    native: NativeAttention, slot: int, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    stored = poisoned(row_format(2, 64, 4), 4)
    states = torch.zeros(1, 2, 64)
    with pytest.raises(CacheError, match="a token slot lies outside of the pool"):
        native.store(stored, stored, torch.tensor([slot]), states, states)
    assert (stored.rows == 255).all()
    with pytest.raises(CacheError, match="keys and values of these slots"):
        native.store(stored, stored, torch.tensor([1, 2]), states, states)


def test_groups_whose_fit_would_not_be_exact_are_refused(native: NativeAttention, poisoned: MakePoisoned) -> None:
    stored = poisoned(RowFormat(1, 512, QuantSpec(4, fit="least_squares")), 4)
    states = torch.zeros(1, 1, 512)
    with pytest.raises(PrecisionError, match="a grid is fitted to at most 256 channels"):
        native.store(stored, stored, torch.tensor([0]), states, states)
