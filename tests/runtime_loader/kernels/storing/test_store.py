"""The store kernel writes the bytes of `quant.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from option_rows.covering_rows import covering_parameters

from kvtuner.precision import ALL_BITS, used_word_bits, words_offset
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.storing.launch_store import STORED_TOKENS, store
from kvtuner.runtime_loader.kernels.transform_steps import KERNEL_STEPS
from kvtuner.transforms import TRANSFORMS, candidate_transforms

if TYPE_CHECKING:
    from fixture_types import MakePoisoned, MakeRowFormat

    from kvtuner.precision import Fit
    from kvtuner.runtime_loader.packed_attention import PackedRows
    from kvtuner.runtime_loader.row_format import RowFormat

# numpy's, of lanes that the kernel then throws away
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KINDS = [name for name in candidate_transforms("k") if set(TRANSFORMS[name].steps) <= set(KERNEL_STEPS)]
SHAPES = ((2, 64), (3, 80), (2, 96), (1, 128))

TOKENS = 2 * STORED_TOKENS - 1
SLOTS = 20
V_BITS = {2: 4, 3: 3, 4: 8, 8: 2, 16: 4}


def hard_states(num_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Every kind of group that has a rule of its own."""
    x = torch.randn(TOKENS, num_heads, head_dim, generator=torch.Generator().manual_seed(3))
    x[1, 0, 3], x[2, 0, 5], x[3], x[4] = torch.nan, torch.inf, 0.0, -0.0
    x[5] *= 1e-6
    x[6, :, ::2] = 100.0
    x[7] += 300.0
    x[8, :, 1] = 70000.0
    x[9] *= 1e-4
    x[10, :, 2] = 20.0
    return x.to(dtype)


def assert_stored(k_format: RowFormat, v_format: RowFormat, poisoned: MakePoisoned, dtype: torch.dtype) -> None:
    k = hard_states(k_format.num_heads, k_format.head_dim, dtype)
    v = 3 * hard_states(v_format.num_heads, v_format.head_dim, dtype).flip(0)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[:TOKENS]
    expected, found = ([poisoned(each, SLOTS, dtype) for each in (k_format, v_format)] for _ in range(2))
    for stored, states in zip(expected, (k, v), strict=True):
        stored.write(slots, states)
    store(*(KernelSide.of(stored) for stored in found), slots, k, v)
    for name, wanted, got in zip(("keys", "values"), expected, found, strict=True):
        wanted_bytes, got_bytes = (stored.rows.view(torch.uint8).flatten(1) for stored in (wanted, got))
        written = is_written(wanted)
        assert torch.equal(wanted_bytes[:, written], got_bytes[:, written]), name
        assert (got_bytes[:, ~written] == 255).all(), name  # as `poisoned` has it


def is_written(stored: PackedRows) -> torch.Tensor:
    """The bytes of a row without its padding before and behind the words, which the kernel leaves alone."""
    spec, size = stored.format.spec, stored.rows.view(torch.uint8).flatten(1).shape[1]
    if spec is None:
        return torch.ones(size, dtype=torch.bool)
    heads, dim = stored.format.num_heads, stored.format.head_dim
    first_word, byte = words_offset(heads, dim, spec.bits, spec.word_bits), torch.arange(size)
    word_bytes = used_word_bits(spec.bits, spec.word_bits) // 8
    last_word = first_word + word_bytes * heads * (dim // (spec.group_size or dim))
    return (byte < heads * dim * spec.bits // 8) | ((byte >= first_word) & (byte < last_word))


@pytest.mark.parametrize(*covering_parameters(shape=SHAPES, bits=ALL_BITS, kind=KINDS, symmetric=(False, True)))
def test_rows_are_those_of_quant(
    shape: tuple[int, int], bits: int, kind: str, symmetric: bool, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    v_kind = "hadamard" if "hadamard" in kind else "none"
    keys = row_format(*shape, bits, kind, symmetric=symmetric)
    values = row_format(*shape, V_BITS[bits], v_kind, symmetric=not symmetric)
    assert_stored(keys, values, poisoned, torch.float16)


@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (2, 64), (2, 256), (3, 32), (3, 128), (4, 64), (4, 128)])
def test_groups_have_words_of_their_own(
    bits: int, group_size: int, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    keys = row_format(1, 256, bits, "centered+balanced+hadamard", group_size)
    assert_stored(keys, row_format(1, 256, 8, "none", 128), poisoned, torch.float32)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(
    ("bits", "head_dim", "group_size"),
    [
        (2, 64, None),
        (3, 64, None),
        (4, 64, None),
        (2, 80, None),
        (3, 80, 40),
        (4, 96, 48),
    ],
)
def test_fitted_rows_are_those_of_quant(
    bits: int,
    head_dim: int,
    group_size: int | None,
    symmetric: bool,
    row_format: MakeRowFormat,
    poisoned: MakePoisoned,
) -> None:
    keys = row_format(2, head_dim, bits, "none", group_size, symmetric, "least_squares")
    values = row_format(2, head_dim, V_BITS[bits], "hadamard", None, symmetric, "least_squares")
    assert_stored(keys, values, poisoned, torch.float32)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("fit", ["minmax", "least_squares"])
@pytest.mark.parametrize(
    ("bits", "head_dim", "group_size"),
    [(2, 64, None), (3, 64, 8), (4, 64, 16), (2, 80, None), (3, 80, 40), (4, 96, 48)],
)
def test_rows_of_short_words_are_those_of_quant(
    bits: int,
    head_dim: int,
    group_size: int | None,
    fit: Fit,
    symmetric: bool,
    row_format: MakeRowFormat,
    poisoned: MakePoisoned,
) -> None:
    keys = row_format(3, head_dim, bits, "none", group_size, symmetric, fit, 16)
    values = row_format(3, head_dim, V_BITS[bits], "hadamard", None, not symmetric, fit, 16)
    assert_stored(keys, values, poisoned, torch.float32)


def test_no_tokens_are_no_launch(row_format: MakeRowFormat, poisoned: MakePoisoned) -> None:
    stored = poisoned(row_format(1, 64, 4), 3)
    side = KernelSide.of(stored)
    none = torch.zeros(0, 1, 64)
    store(side, side, torch.zeros(0, dtype=torch.int64), none, none)
    assert (stored.rows == 255).all()
