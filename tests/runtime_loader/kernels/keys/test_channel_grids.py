"""Keys per channel in kernels: what is read of them is what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from option_rows.channel_groups import CASES, NUM_SLOTS, bounds_of, group_slots, keys_format
from oracles.dequantized_attention import dequantized_decode

from kvtuner.precision import ExactWindow
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.exact_ring import EMPTY, ExactRing, NewTokens, WindowReads
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    from fixture_types import MakePoisoned

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LENGTHS = (0, 1, 33, 130)
TOLERANCE = 1e-2
"""The error that test_decode.py allows, where queries and weights are rounded to fp16."""


@pytest.fixture
def attention() -> TritonAttention:
    return TritonAttention(torch.device("cpu"))


@pytest.fixture
def filled(poisoned: MakePoisoned) -> tuple[PackedRows, PackedRows]:
    """Keys at 4 bits in groups of 16 tokens and values at 4 bits, two heads of 64 channels."""
    keys, values = poisoned(keys_format(2, 64, 4, 16), NUM_SLOTS), poisoned(RowFormat(2, 64, QuantSpec(4)), NUM_SLOTS)
    generator = torch.Generator().manual_seed(2)
    for stored in (keys, values):
        stored.write(torch.arange(NUM_SLOTS), torch.randn(NUM_SLOTS, 2, 64, generator=generator))
    return keys, values


@pytest.mark.parametrize(("shape", "bits", "group"), CASES, ids=str)
def test_decoding_is_attention_over_what_rows_mean(
    attention: TritonAttention, shape: tuple[int, int, int], bits: int, group: int, poisoned: MakePoisoned
) -> None:
    heads, channels, gqa = shape
    generator = torch.Generator().manual_seed(7)
    keys = poisoned(keys_format(heads, channels, bits, group), NUM_SLOTS)
    values = poisoned(RowFormat(heads, channels, QuantSpec(4)), NUM_SLOTS)
    # Channels that differ in size by orders of magnitude and lie off zero, as those of models do.
    size = torch.exp(2 * torch.randn(1, heads, channels, generator=generator))
    size[:, :, 1] = 0.0
    k = size * torch.randn(NUM_SLOTS, heads, channels, generator=generator) + size
    keys.write(torch.arange(NUM_SLOTS), k)
    attention.store_side(values, torch.arange(NUM_SLOTS), torch.randn(NUM_SLOTS, heads, channels, generator=generator))
    q = torch.randn(len(LENGTHS), gqa * heads, channels, generator=generator) / size.mean()
    indptr, slots = bounds_of(LENGTHS), group_slots(LENGTHS, group)
    for cap in (0.0, 5.0):
        scores = ScoreScaling(channels**-0.5, cap)
        found = attention.decode(q, keys, values, indptr, slots, scores)
        expected = dequantized_decode(q, keys, values, indptr, slots, scores)
        largest = expected.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1e-6)
        assert not found[0].any()
        assert ((found - expected).abs() / largest).max().item() < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_read_back_as_they_mean(
    attention: TritonAttention, dtype: torch.dtype, filled: tuple[PackedRows, PackedRows]
) -> None:
    keys, values = filled
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))[:77]
    for stored in (keys, values):
        assert torch.equal(attention.read(stored, slots, dtype), stored.read(slots, dtype))


def test_chunks_read_a_prefix_beside_new_tokens_and_copies(
    attention: TritonAttention, filled: tuple[PackedRows, PackedRows]
) -> None:
    keys, values = filled
    past, new, window = (75, 0, 16), (21, 5, 1), ExactWindow(19, 2)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(sum(new), heads, 64, generator=generator) for heads in (6, 2, 2))
    positions = torch.full((3, window.num_tokens), EMPTY, dtype=torch.int32)
    ring = ExactRing(*(torch.zeros(3, window.num_tokens, 2, 64) for _ in range(2)), positions, window)
    own = [torch.randn(sum(past), 2, 64, generator=generator) for _ in range(2)]
    ring.store(NewTokens(torch.arange(3), bounds_of([0, 0, 0]), bounds_of(past)), *own)
    bounds = ExtendBounds(bounds_of(new), bounds_of(past), group_slots(past, 16), max(new))
    # The words of a group that is not full are any: here they are NaN, and its tokens are read from copies.
    tail = group_slots(past, 16)[64:75]
    keys.rows[tail] = 255
    scores = ScoreScaling(0.05)
    for reads in (WindowReads(ring, torch.arange(3)), WindowReads(ring, torch.arange(3), (2 * k, 2 * v))):
        found = attention.extend(q, k, v, keys, values, bounds, scores, window=reads)
        expected = TorchAttention().extend(q, k, v, keys, values, bounds, scores, window=reads)
        near = torch.cat((torch.arange(19 - 11), torch.arange(21, 27)))  # of the first, whose windows reach that group
        assert not found[near].isnan().any()
        error = (found[near] - expected[near]).abs().max() / expected[near].abs().max()
        assert error < TOLERANCE
