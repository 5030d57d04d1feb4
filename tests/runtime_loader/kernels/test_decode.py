"""The decode kernel attends over packed rows as the torch implementation does."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from option_rows.width_pairs import width_pairs
from oracles.dequantized_attention import WITH_NAN, assert_nan_is_seen_by_its_request_alone

from kvtuner.precision import num_slots
from kvtuner.runtime_loader.kernels import launch
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.launch_settings import INTERPRETED, JOINED, WIDE, DecodeLaunch
from kvtuner.runtime_loader.kernels.scratch import Scratch
from kvtuner.runtime_loader.packed_attention import PackedRows, ScoreScaling
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    from fixture_types import MakePoisoned, MakeRowFormat

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LENGTHS = (0, 1, 33, 70)
NUM_SPLITS = 3
# Queries and weights are rounded to fp16 once each, 2 ** -11 relative. Scores of some ten nats make 5e-3 of a weight of
# that, and values that differ by orders of magnitude let one weight decide.
TOLERANCE = 1e-2
KINDS = ("centered+hadamard", "none")


def decode(
    q: torch.Tensor,
    keys: PackedRows,
    values: PackedRows,
    indptr: torch.Tensor,
    slots: torch.Tensor,
    scores: ScoreScaling,
    num_splits: int = NUM_SPLITS,
    settings: DecodeLaunch = INTERPRETED,
) -> torch.Tensor:
    out, scratch = torch.full_like(q, torch.nan), Scratch(1 << 20, q.device)
    layer = launch.LayerSides(KernelSide.of(keys), KernelSide.of(values))
    launch.decode(q, layer, indptr, slots, scores, settings, num_splits, scratch, out)
    return out


def assert_agrees(
    keys: PackedRows, values: PackedRows, gqa: int, cap: float = 0.0, settings: DecodeLaunch = INTERPRETED
) -> None:
    generator = torch.Generator().manual_seed(7)
    num_heads, head_dim = keys.format.num_heads, keys.format.head_dim
    slots = torch.randperm(len(keys.rows), generator=generator)[: sum(LENGTHS)]
    keys.write(slots, torch.randn(len(slots), num_heads, head_dim, generator=generator).half())
    # Scales of values that differ by orders of magnitude, and some that are subnormal.
    size = torch.exp(3 * torch.randn(len(slots), 1, 1, generator=generator))
    size[::7] = 1e-6
    values.write(slots, (size * torch.randn(len(slots), *values.shape[1:], generator=generator)).half())
    q = torch.randn(len(LENGTHS), num_heads * gqa, head_dim, generator=generator)
    indptr = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    scores = ScoreScaling(head_dim**-0.5, cap)
    expected = TorchAttention().decode(q, keys, values, indptr, slots, scores)
    largest = expected.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1e-6)
    joins = num_heads % JOINED == 0 and gqa * JOINED <= settings.tile
    for heads in (1, JOINED) if joins else (1,):
        found = decode(q, keys, values, indptr, slots, scores, settings=replace(settings, heads=heads))
        assert (found[0] == 0).all()
        assert ((found - expected).abs() / largest).max().item() < TOLERANCE


@pytest.mark.parametrize(*width_pairs(pytest.mark.slow))
def test_every_pair(k_bits: int, v_bits: int, row_format: MakeRowFormat, poisoned: MakePoisoned) -> None:
    keys = poisoned(row_format(2, 64, k_bits, "centered+balanced+hadamard"), 130)
    assert_agrees(keys, poisoned(row_format(2, 64, v_bits, "hadamard"), 130), 4)


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "gqa"), [(1, 128, 7), (3, 80, 1), (2, 96, 2), (1, 256, 4), (1, 64, 20)]
)
@pytest.mark.parametrize(("bits", "cap"), [((4, 2), 0.0), ((3, 3), 5.0)])
@pytest.mark.slow
def test_every_shape(
    num_heads: int,
    head_dim: int,
    gqa: int,
    cap: float,
    bits: tuple[int, int],
    row_format: MakeRowFormat,
    poisoned: MakePoisoned,
) -> None:
    keys = poisoned(row_format(num_heads, head_dim, bits[0], "centered+balanced+hadamard"), 130)
    assert_agrees(keys, poisoned(row_format(num_heads, head_dim, bits[1], "hadamard"), 130), gqa, cap)


@pytest.mark.parametrize(
    ("bits", "num_heads", "head_dim", "gqa", "cap"),
    [((4, 3), 4, 128, 3, 5.0), ((3, 8), 6, 80, 1, 0.0), ((2, 4), 2, 96, 3, 0.0), ((2, 4), 2, 96, 1, 5.0)],
)
def test_heads_that_share_a_program(
    bits: tuple[int, int],
    num_heads: int,
    head_dim: int,
    gqa: int,
    cap: float,
    row_format: MakeRowFormat,
    poisoned: MakePoisoned,
) -> None:
    sides = (row_format(num_heads, head_dim, width, kind) for width, kind in zip(bits, KINDS, strict=True))
    keys, values = (poisoned(side, 130) for side in sides)
    assert_agrees(keys, values, gqa, cap)


@pytest.mark.parametrize("gqa", [3, 20])
@pytest.mark.parametrize("bits", [(4, 2), (3, 16)])
def test_wide_tiles(gqa: int, bits: tuple[int, int], row_format: MakeRowFormat, poisoned: MakePoisoned) -> None:
    keys, values = (poisoned(row_format(2, 64, width, kind), 130) for width, kind in zip(bits, KINDS, strict=True))
    assert_agrees(keys, values, gqa, 5.0, replace(INTERPRETED, tile=WIDE))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_groups(bits: int, row_format: MakeRowFormat, poisoned: MakePoisoned) -> None:
    keys = poisoned(row_format(2, 128, bits, "none", 128 // num_slots(bits)), 130)
    assert_agrees(keys, poisoned(row_format(2, 128, bits, "none", 64, symmetric=True), 130), 2)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_short_words(bits: int, row_format: MakeRowFormat, poisoned: MakePoisoned) -> None:
    keys = row_format(2, 64, bits, "centered+hadamard", 64 // num_slots(bits), fit="least_squares", word_bits=16)
    values = row_format(2, 64, 6 - bits, "hadamard", 32, fit="least_squares", word_bits=16)
    assert_agrees(poisoned(keys, 130), poisoned(values, 130), 2)


@pytest.mark.parametrize(
    ("bits", "num_heads", "head_dim", "group_size", "cap"),
    [
        (4, 3, 64, 32, 0.0),
        (4, 2, 128, 32, 5.0),
        (3, 1, 80, 40, 0.0),
        (3, 1, 80, 80, 5.0),
        (3, 2, 96, 48, 5.0),
        (2, 3, 128, 16, 0.0),
        (2, 1, 256, 128, 5.0),
    ],
)
def test_short_words_that_share_four_bytes_with_another_group_or_head(
    bits: int, num_heads: int, head_dim: int, group_size: int, cap: float, row_format: MakeRowFormat,
    poisoned: MakePoisoned,
) -> None:  # fmt: skip
    sides = (row_format(num_heads, head_dim, bits, kind, group_size, word_bits=16) for kind in ("centered", "none"))
    keys, values = (poisoned(side, 130) for side in sides)
    assert_agrees(keys, values, 2, cap)


def test_short_words_beside_long_ones(row_format: MakeRowFormat, poisoned: MakePoisoned) -> None:
    keys, values = row_format(3, 80, 4, "none", word_bits=16), row_format(3, 80, 2, "none")
    assert_agrees(poisoned(keys, 130), poisoned(values, 130), 1)
    assert_agrees(poisoned(values, 130), poisoned(keys, 130), 1, 5.0)


@pytest.mark.parametrize("num_splits", [1, NUM_SPLITS])
@pytest.mark.parametrize("where", WITH_NAN)
def test_nan_is_seen_by_its_request_and_by_no_other(
    where: str, num_splits: int, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    assert_nan_is_seen_by_its_request_alone(partial(decode, num_splits=num_splits), where, row_format, poisoned)


def test_nothing_is_lost_over_a_long_split(row_format: MakeRowFormat, poisoned: MakePoisoned) -> None:
    """Values that cancel leave an output far below them; each one's error must cancel as well."""
    keys, values = (poisoned(row_format(1, 64, 4), 3000) for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    slots = torch.randperm(3000, generator=generator)
    for stored in (keys, values):
        stored.write(slots, torch.randn(3000, 1, 64, generator=generator))
    q, indptr = torch.randn(1, 2, 64, generator=generator), torch.tensor([0, 3000])
    expected = TorchAttention().decode(q, keys, values, indptr, slots, ScoreScaling(0.02))
    assert expected.norm() < 0.05 * values.read(slots, torch.float32).norm(dim=-1).mean() * 2**0.5
    found = decode(q, keys, values, indptr, slots, ScoreScaling(0.02), num_splits=1)
    assert (found - expected).norm() < 2e-3 * expected.norm()
