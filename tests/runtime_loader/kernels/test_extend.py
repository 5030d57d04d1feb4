"""The extend kernels attend as the torch implementation does: over packed prefixes, and causally over new tokens."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from option_rows.width_pairs import width_pairs

from kvtuner.runtime_loader.kernels import triton_attention as attention
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    from fixture_types import MakePoisoned, MakeRowFormat

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PREFIXES = (0, 1, 33, 40)
FRESH = (5, 20, 0, 1)
PADDING = 2
TOLERANCE = 1e-2  # as of decoding: queries and weights of rows are rounded to fp16


def assert_agrees(
    keys: PackedRows, values: PackedRows, gqa: int, cap: float = 0.0, fresh: tuple[int, ...] = FRESH
) -> None:
    generator = torch.Generator().manual_seed(11)
    num_heads, head_dim = keys.format.num_heads, keys.format.head_dim
    slots = torch.randperm(len(keys.rows), generator=generator)[: sum(PREFIXES)]

    def states(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, head_dim, generator=generator)

    keys.write(slots, states(len(slots), num_heads).half())
    values.write(slots, states(len(slots), num_heads).half())
    num_tokens = sum(fresh) + PADDING
    q, k, v = states(num_tokens, num_heads * gqa), states(num_tokens, num_heads), states(num_tokens, num_heads)
    k[sum(fresh) :] = v[sum(fresh) :] = torch.nan
    bounds = ExtendBounds(
        torch.tensor([0, *itertools.accumulate(fresh)]),
        torch.tensor([0, *itertools.accumulate(PREFIXES)]),
        slots,
        max(fresh),
    )
    scores = ScoreScaling(head_dim**-0.5, cap)
    expected = TorchAttention().extend(q, k, v, keys, values, bounds, scores)[:-PADDING]
    found = TritonAttention(torch.device("cpu")).extend(q, k, v, keys, values, bounds, scores)
    assert (found[-PADDING:] == 0).all()
    largest = expected.abs().amax(dim=(1, 2), keepdim=True)
    assert ((found[:-PADDING] - expected).abs() / largest).max().item() < TOLERANCE
    # The first request has no prefix: nothing of it is rounded.
    torch.testing.assert_close(found[: fresh[0]], expected[: fresh[0]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(*width_pairs(pytest.mark.full))
def test_every_pair(k_bits: int, v_bits: int, row_format: MakeRowFormat, poisoned: MakePoisoned) -> None:
    keys = poisoned(row_format(2, 64, k_bits, "centered+balanced+hadamard"), 90)
    assert_agrees(keys, poisoned(row_format(2, 64, v_bits, "hadamard"), 90), 4)


@pytest.mark.parametrize(("num_heads", "head_dim", "gqa"), [(1, 128, 7), (3, 80, 1), (2, 96, 2), (1, 256, 4)])
@pytest.mark.parametrize(
    ("cap", "kind"),
    [
        (0.0, "centered+balanced+hadamard"),
        (5.0, "none"),
        pytest.param(5.0, "centered+balanced+hadamard", marks=pytest.mark.full),
        pytest.param(0.0, "none", marks=pytest.mark.full),
    ],
)
@pytest.mark.slow
def test_every_shape(
    num_heads: int, head_dim: int, gqa: int, cap: float, kind: str, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    keys = poisoned(row_format(num_heads, head_dim, 4, kind), 90)
    assert_agrees(keys, poisoned(row_format(num_heads, head_dim, 2, kind="hadamard"), 90), gqa, cap)


def test_one_new_token_each(row_format: MakeRowFormat, poisoned: MakePoisoned) -> None:
    keys = poisoned(row_format(2, 64, 4, "centered+balanced+hadamard"), 90)
    assert_agrees(keys, poisoned(row_format(2, 64, 4), 90), 4, fresh=(1, 1, 0, 1))


def test_a_prefix_is_read_back_where_many_read_it_and_it_fits(
    row_format: MakeRowFormat, poisoned: MakePoisoned, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, values = (poisoned(row_format(2, 64, bits, kind), 90) for bits, kind in ((4, "centered"), (8, "hadamard")))
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(90, generator=generator)[:50]
    for stored in (keys, values):
        stored.write(slots, torch.randn(50, 2, 64, generator=generator))
    implementation, q = TritonAttention(torch.device("cpu")), torch.zeros(3, 8, 64)

    def read(longest: int, end: int = 50) -> tuple[torch.Tensor, torch.Tensor] | None:
        bounds = ExtendBounds(torch.tensor([0, longest]), torch.tensor([0, end], dtype=torch.int32), slots, longest)
        return implementation.read_prefix(q, keys, values, bounds)

    assert read(attention.WORTH_READING // 4 - 1) is None
    for end in (50, 20):  # more slots than there are tokens: what lies behind is not read
        read_back = read(attention.WORTH_READING // 4, end)
        assert read_back is not None
        for found, stored in zip(read_back, (keys, values), strict=True):
            assert torch.equal(found[:end], stored.read(slots[:end], torch.float32))
    monkeypatch.setattr(attention, "WORKSPACE_BYTES", 50 * 2 * 2 * 64 * 4 - 1)
    assert read(1000) is None
