"""Keys per channel in C++: rows are those of `quant.py`, and attention is that over what they mean, in float64."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from hostile_groups import hostile_groups
from oracles.dequantized_attention import dequantized_decode

from kvtuner.errors import CacheError
from kvtuner.precision import PACKED_BITS, TOKEN_GROUPS, ExactWindow
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.exact_ring import ExactRing, WindowReads
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    from fixture_types import MakePoisoned

    from kvtuner.runtime_loader.cpu.native_attention import NativeAttention

SHAPES = [(1, 16, 1), (3, 40, 2), (2, 80, 3), (1, 264, 7), (2, 128, 4)]
"""The KV heads, channels and query heads to a KV head; 40 and 264 channels have units that fill no vector."""
CASES = [(shape, bits) for shape, bits in itertools.product(SHAPES, PACKED_BITS) if shape[1] * bits % 16 == 0]
LENGTHS = (0, 1, 63, 64, 65, 130)
NUM_SLOTS = 512


def tolerance(native: NativeAttention) -> float:
    """The error, as a part of a request's largest output, that products may have: see test_native_attention.py."""
    return 2e-3 if native.rounding else 3e-5


def keys_format(heads: int, channels: int, bits: int, group: int) -> RowFormat:
    return RowFormat(heads, channels, QuantSpec(bits, token_group=group, symmetric=bits == 3))


def pool_of(native: NativeAttention, keys: PackedRows, values: PackedRows, seed: int = 1) -> None:
    """Fill a pool; channels of keys differ in size and lie off zero, as those of models do."""
    generator = torch.Generator().manual_seed(seed)
    for stored, spread in ((keys, 1.0), (values, 0.0)):
        _, heads, channels = stored.shape
        size = torch.exp(spread * torch.randn(1, heads, channels, generator=generator))
        size[:, :, 1] = 0.0  # a channel whose groups are constant
        states = size * torch.randn(NUM_SLOTS, heads, channels, generator=generator)
        states += 3 * spread * torch.randn(1, heads, channels, generator=generator)
        native.store_side(stored, torch.arange(NUM_SLOTS), states)


def slots_in(order: str, group: int) -> torch.Tensor:
    """Slots of requests: in whole groups, as pages have them, or in any order, where a group may be one token."""
    generator = torch.Generator().manual_seed(3)
    if order == "any":
        return torch.randperm(NUM_SLOTS, generator=generator)
    groups = torch.randperm(NUM_SLOTS // group, generator=generator)
    return (groups[:, None] * group + torch.arange(group)).flatten()[2:]  # without two sinks


@pytest.mark.parametrize(("order", "cap"), [("groups", 0.0), ("any", 5.0)])
@pytest.mark.parametrize(("shape", "bits"), CASES, ids=str)
def test_decoding_is_attention_over_what_rows_mean(
    native: NativeAttention, shape: tuple[int, int, int], bits: int, order: str, cap: float, poisoned: MakePoisoned
) -> None:
    heads, channels, gqa = shape
    for group in TOKEN_GROUPS[bits % 2 :: 2]:
        keys = poisoned(keys_format(heads, channels, bits, group), NUM_SLOTS)
        values = poisoned(RowFormat(heads, channels, QuantSpec(4)), NUM_SLOTS)
        pool_of(native, keys, values)
        slots = slots_in(order, group)[: sum(LENGTHS)]
        generator = torch.Generator().manual_seed(7)
        q = torch.randn(len(LENGTHS), gqa * heads, channels, generator=generator)
        indptr, scores = torch.tensor([0, *itertools.accumulate(LENGTHS)]), ScoreScaling(channels**-0.5 / 3, cap)
        found = native.decode(q, keys, values, indptr, slots, scores)
        expected = dequantized_decode(q, keys, values, indptr, slots, scores)
        largest = expected.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1e-6)
        assert not found[0].any()
        assert ((found - expected).abs() / largest).max().item() < tolerance(native)


def test_chunks_read_a_prefix_beside_new_tokens_and_copies(native: NativeAttention, poisoned: MakePoisoned) -> None:
    group, past, fresh, window = 16, 75, 21, ExactWindow(19, 2)
    keys, values = poisoned(keys_format(2, 64, 4, group), NUM_SLOTS), poisoned(RowFormat(2, 64, None), NUM_SLOTS)
    pool_of(native, keys, values)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(fresh, heads, 64, generator=generator) for heads in (6, 2, 2))
    slots, positions = slots_in("groups", group)[:past], torch.full((1, window.num_tokens), -1, dtype=torch.int32)
    ring = ExactRing(*(torch.zeros(1, window.num_tokens, 2, 64) for _ in range(2)), positions, window)
    for position in (0, 1, *range(past - window.residual_length, past)):
        place = ring.places(torch.tensor([position]))
        ring.positions[0, place] = position
        for copies in (ring.keys, ring.values):
            copies[0, place] = torch.randn(2, 64, generator=generator)
    bounds, scores = ExtendBounds(torch.tensor([0, fresh]), torch.tensor([0, past]), slots, fresh), ScoreScaling(0.05)
    for reads in (None, WindowReads(ring, torch.tensor([0])), WindowReads(ring, torch.tensor([0]), (2 * k, 2 * v))):
        found = native.extend(q, k, v, keys, values, bounds, scores, window=reads)
        expected = TorchAttention().extend(q, k, v, keys, values, bounds, scores, window=reads)
        assert (found - expected).abs().max() < tolerance(native) * expected.abs().max()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", PACKED_BITS)
def test_rows_of_hostile_groups_are_those_of_quant(
    native: NativeAttention, bits: int, symmetric: bool, poisoned: MakePoisoned
) -> None:
    shapes = [shape for shape, width in CASES if width == bits and shape[1] < 128]
    for (heads, channels, _), group in itertools.product(shapes, TOKEN_GROUPS):
        of_channels = hostile_groups(group)[:, 0]  # [kinds, tokens]
        places = torch.arange(2 * heads * channels) % len(of_channels)
        states = of_channels[places].unflatten(0, (2, heads, channels)).movedim(-1, 1).flatten(0, 1).contiguous()
        states[3, 0, 1], states[group, -1, 2], states[5, 0, 0] = torch.nan, -torch.inf, torch.inf
        spec = QuantSpec(bits, token_group=group, symmetric=symmetric)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            stored = poisoned(RowFormat(heads, channels, spec), 4 * group)
            slots, others = torch.cat([torch.arange(group) + at * group for at in (2, 0, 3, 1)]).split(2 * group)
            native.store_side(stored, slots, states.to(dtype))
            assert torch.equal(stored.rows[slots], stored.format.pack(states.to(dtype)))
            assert (stored.rows[others] == 255).all()


def test_states_are_read_by_their_strides_on_two_threads_as_on_one(
    native: NativeAttention, poisoned: MakePoisoned
) -> None:
    stored = poisoned(keys_format(2, 64, 4, 32), 128)
    states = torch.randn(128, 5, 64, generator=torch.Generator().manual_seed(0))[:, 1:3]
    torch.set_num_threads(2)
    native.store_side(stored, torch.arange(128), states)
    assert torch.equal(stored.rows, stored.format.pack(states))


def test_nan_is_seen_by_requests_of_its_group_alone(native: NativeAttention, poisoned: MakePoisoned) -> None:
    keys, values = poisoned(keys_format(1, 64, 4, 16), 64), poisoned(RowFormat(1, 64, QuantSpec(4)), 64)
    k, v = torch.randn(2, 64, 1, 64, generator=torch.Generator().manual_seed(0))
    k[20, 0, 3] = torch.nan
    native.store(keys, values, torch.arange(64), k, v)
    slots, q = torch.tensor([0, 17, 33, 48]), torch.ones(4, 2, 64)
    found = native.decode(q, keys, values, torch.arange(5), slots, ScoreScaling(0.1))
    assert found.isnan().flatten(1).all(1).tolist() == [False, True, False, False]
    assert not found[[0, 2, 3]].isnan().any()


def test_groups_that_are_not_whole_are_refused(native: NativeAttention, poisoned: MakePoisoned) -> None:
    keys, values = poisoned(keys_format(1, 64, 4, 16), 40), poisoned(RowFormat(1, 64, None), 40)
    q, scores = torch.zeros(1, 2, 64), ScoreScaling(0.1)
    with pytest.raises(CacheError, match="a token slot lies outside of the pool"):  # the words of its group do
        native.decode(q, keys, values, torch.tensor([0, 1]), torch.tensor([32]), scores)
    with pytest.raises(CacheError, match="keys per channel are stored in groups of 16 tokens, not 17"):
        native.store_side(keys, torch.arange(17), torch.zeros(17, 1, 64))
    assert (keys.rows == 255).all()


@pytest.mark.parametrize(
    "slots",
    [
        [*range(8, 24), *range(32, 48)],  # two halves of groups
        [*range(16), *range(17, 33)],
        [*range(16), *range(47, 31, -1)],
        [*range(16), *[32] * 16],
        [*range(15), 16, 15, *range(17, 32)],
    ],
    ids=["across", "unaligned", "reversed", "repeated", "exchanged"],
)
def test_slots_that_are_not_groups_of_the_pool_are_refused_before_any_is_written(
    native: NativeAttention, slots: list[int], poisoned: MakePoisoned
) -> None:
    """A query reads the scales of a group from its aligned slots, wherever they were written."""
    keys = poisoned(keys_format(1, 64, 4, 16), 48)
    with pytest.raises(CacheError, match=r"^slots of keys per channel are no whole groups of the pool$"):
        native.store_side(keys, torch.tensor(slots), torch.ones(32, 1, 64))
    assert (keys.rows == 255).all()
