"""The extend kernels attend as the torch implementation does: over packed prefixes, and causally over new tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kvtuner.runtime_loader.kernels.attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import ExtendBounds, Scores, StoredRows, TorchAttention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PREFIXES = (0, 1, 33, 40)
FRESH = (5, 20, 0, 1)
PADDING = 2
TOLERANCE = 1e-2  # as of decoding: queries and weights of rows are rounded to fp16


def assert_agrees(keys: StoredRows, values: StoredRows, gqa: int, cap: float = 0.0) -> None:
    generator = torch.Generator().manual_seed(11)
    num_heads, head_dim = keys.format.num_heads, keys.format.head_dim
    slots = torch.randperm(len(keys.rows), generator=generator)[: sum(PREFIXES)]

    def states(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, head_dim, generator=generator)

    keys.write(slots, states(len(slots), num_heads).half())
    values.write(slots, states(len(slots), num_heads).half())
    num_tokens = sum(FRESH) + PADDING
    q, k, v = states(num_tokens, num_heads * gqa), states(num_tokens, num_heads), states(num_tokens, num_heads)
    k[sum(FRESH) :] = v[sum(FRESH) :] = torch.nan
    bounds = ExtendBounds(
        torch.tensor([0, *itertools.accumulate(FRESH)]),
        torch.tensor([0, *itertools.accumulate(PREFIXES)]),
        slots,
        max(FRESH),
    )
    scores = Scores(head_dim**-0.5, cap)
    expected = TorchAttention().extend(q, k, v, keys, values, bounds, scores)[:-PADDING]
    found = TritonAttention(torch.device("cpu")).extend(q, k, v, keys, values, bounds, scores)
    assert (found[-PADDING:] == 0).all()
    largest = expected.abs().amax(dim=(1, 2), keepdim=True)
    assert ((found[:-PADDING] - expected).abs() / largest).max().item() < TOLERANCE
    # The first request has no prefix: nothing of it is rounded.
    torch.testing.assert_close(found[: FRESH[0]], expected[: FRESH[0]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k_bits", [2, 4, 8, 16])
@pytest.mark.parametrize("v_bits", [2, 4, 8, 16])
def test_every_pair(k_bits: int, v_bits: int, row_format: Any, poisoned: Any) -> None:
    keys = poisoned(row_format(2, 64, k_bits, "centered+balanced+hadamard"), 90)
    assert_agrees(keys, poisoned(row_format(2, 64, v_bits, "hadamard"), 90), 4)


@pytest.mark.parametrize(("num_heads", "head_dim", "gqa"), [(1, 128, 7), (3, 80, 1), (2, 96, 2), (1, 256, 4)])
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("kind", ["centered+balanced+hadamard", "none"])
@pytest.mark.slow
def test_every_shape(
    num_heads: int, head_dim: int, gqa: int, cap: float, kind: str, row_format: Any, poisoned: Any
) -> None:
    keys = poisoned(row_format(num_heads, head_dim, 4, kind), 90)
    assert_agrees(keys, poisoned(row_format(num_heads, head_dim, 2, kind="hadamard"), 90), gqa, cap)
