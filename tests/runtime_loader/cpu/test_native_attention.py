"""Attention in C++ is attention over what rows mean, in float64, for every pair, shape, word and window."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from oracles.dequantized_attention import WITH_NAN, assert_nan_is_seen_by_its_request_alone, dequantized_decode
from windowed_requests import WindowedPool, live

from kvtuner.errors import CacheError, PrecisionError, ServingError
from kvtuner.precision import ALL_BITS, ExactWindow, num_slots
from kvtuner.quant import STEPS, QuantSpec, Step, Transform, saturated
from kvtuner.runtime_loader.cpu.instruction_sets import runnable_sets
from kvtuner.runtime_loader.cpu.library import compiler
from kvtuner.runtime_loader.cpu.native_attention import NativeAttention
from kvtuner.runtime_loader.cpu.spans import Spans
from kvtuner.runtime_loader.exact_ring import EMPTY, ExactRing, NewTokens, WindowReads
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.runtime_loader.torch_attention import TorchAttention
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from fixture_types import MakePoisoned, MakeRowFormat

    from kvtuner.precision import WordBits

LENGTHS = (0, 1, 63, 64, 65, 130)
NUM_SLOTS = 400
SHAPES = [
    (2, 80, 3),
    *(
        pytest.param(shape, marks=pytest.mark.slow)
        for shape in ((2, 128, 4), (1, 64, 7), (2, 96, 1), (1, 256, 16), (5, 40, 2))
    ),
]
"""The KV heads, channels and query heads to a KV head."""


def tolerance(native: NativeAttention) -> float:
    """The error, as a part of a request's largest output, that products may have.

    In float32 scores of some tens of nats are rounded, and sums of some hundred terms. In int16 a query is rounded to
    2**-16 of its largest channel, of which such scores make 1e-3 of a weight.
    """
    return 2e-3 if native.rounding else 3e-5


def written(stored: PackedRows, slots: torch.Tensor, seed: int) -> None:
    """Write tokens whose sizes differ by orders of magnitude, some of which have subnormal scales."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(torch.randn(len(slots), 1, 1, generator=generator))
    size[::7] = 1e-6
    stored.write(slots, size * torch.randn(len(slots), *stored.shape[1:], generator=generator))


def assert_decodes(native: NativeAttention, keys: PackedRows, values: PackedRows, gqa: int, cap: float = 0.0) -> None:
    generator = torch.Generator().manual_seed(7)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[: sum(LENGTHS)]
    written(keys, slots, 1)
    written(values, slots, 2)
    q = torch.randn(len(LENGTHS), gqa * keys.format.num_heads, keys.format.head_dim, generator=generator)
    indptr, scores = torch.tensor([0, *itertools.accumulate(LENGTHS)]), ScoreScaling(keys.format.head_dim**-0.5, cap)
    found = native.decode(q, keys, values, indptr, slots, scores)
    expected = dequantized_decode(q, keys, values, indptr, slots, scores)
    assert found.dtype == q.dtype and not found[0].any()
    largest = expected.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1e-6)
    assert ((found - expected).abs() / largest).max().item() < tolerance(native)


def formats(
    make: MakeRowFormat, heads: int, channels: int, bits: tuple[int, int], groups: int, word_bits: WordBits
) -> list[RowFormat]:
    kinds = ("centered+balanced+hadamard", "hadamard")
    return [
        make(heads, channels, width, kind, channels // groups, groups == 2, word_bits=word_bits)
        for width, kind in zip(bits, kinds, strict=True)
    ]


@pytest.mark.parametrize("k_bits", ALL_BITS)
@pytest.mark.parametrize("v_bits", ALL_BITS)
@pytest.mark.parametrize("layout", [(1, 32), (2, 16)], ids=["heads, wide words", "groups, short words"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_of_every_shape(
    native: NativeAttention, shape: tuple[int, int, int], layout: tuple[int, WordBits], k_bits: int, v_bits: int,
    row_format: MakeRowFormat, poisoned: MakePoisoned,
) -> None:  # fmt: skip
    heads, channels, gqa = shape
    sides = formats(row_format, heads, channels, (k_bits, v_bits), *layout)
    try:
        keys, values = (poisoned(side, NUM_SLOTS, torch.bfloat16) for side in sides)
    except PrecisionError:
        assert channels * min(k_bits, v_bits) % 16 or channels * max(k_bits, v_bits) % 16 or channels % 16
        return
    assert_decodes(native, keys, values, gqa)


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_as_many_groups_as_slots_and_capped_scores(
    native: NativeAttention, bits: int, cap: float, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    groups = num_slots(bits)
    keys, values = (poisoned(side, NUM_SLOTS) for side in formats(row_format, 3, 128, (bits, 6 - bits), 2, 16))
    assert_decodes(native, keys, values, 4, cap)
    keys, values = (poisoned(row_format(2, 128, bits, kind, 128 // groups), NUM_SLOTS) for kind in ("centered", "none"))
    assert_decodes(native, keys, values, 3, cap)


def test_rows_of_a_step_that_the_library_lacks_are_read(
    native: NativeAttention, monkeypatch: pytest.MonkeyPatch, poisoned: MakePoisoned
) -> None:
    monkeypatch.setitem(STEPS, "flipped", Step(lambda x, _: -x, lambda x, _: -x, lambda q, _: -q))
    spec = QuantSpec(8, Transform(TransformKind("flipped+hadamard", "f", has_values=True)))
    assert_decodes(native, *(poisoned(RowFormat(2, 64, spec), NUM_SLOTS) for _ in range(2)), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_16_bits_are_read_in_every_dtype(
    native: NativeAttention, dtype: torch.dtype, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    keys, values = (poisoned(row_format(2, channels, 16), NUM_SLOTS, dtype) for channels in (72, 40))
    assert_decodes(native, keys, values, 5)


def test_a_long_request_is_read_in_parts(
    native: NativeAttention, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    keys, values = (poisoned(row_format(1, 64, bits), 5000) for bits in (4, 2))
    generator = torch.Generator().manual_seed(3)
    slots, lengths = torch.randperm(5000, generator=generator), [4900, 3]
    for stored in (keys, values):
        stored.write(slots, torch.randn(5000, 1, 64, generator=generator))
    q, indptr, scores = torch.randn(2, 4, 64, generator=generator), torch.tensor([0, 4900, 4903]), ScoreScaling(0.2)
    found = native.decode(q, keys, values, indptr, slots, scores)
    expected = dequantized_decode(q, keys, values, indptr, slots, scores)
    assert (found - expected).abs().max() < tolerance(native) * expected.abs().max()
    # Neither what else is in a batch nor the number of threads changes a result.
    alone = native.decode(q[:1], keys, values, indptr[:2], slots[: lengths[0]], scores)
    torch.set_num_threads(2)
    assert torch.equal(native.decode(q, keys, values, indptr, slots, scores), found)
    assert torch.equal(alone, found[:1])


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("bits", [(4, 2), (3, 16), (16, 8)])
def test_extends_read_rows_of_a_prefix_and_new_tokens_as_they_are(
    native: NativeAttention, bits: tuple[int, int], cap: float, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    keys, values = (poisoned(side, NUM_SLOTS) for side in formats(row_format, 2, 96, bits, 1, 32))
    generator = torch.Generator().manual_seed(5)
    prefixes, fresh = [70, 0, 5, 9], [1, 100, 0, 33]
    slots = torch.randperm(NUM_SLOTS, generator=generator)[: sum(prefixes)]
    written(keys, slots, 1)
    written(values, slots, 2)
    q, k, v = (torch.randn(sum(fresh), heads, 96, generator=generator) for heads in (6, 2, 2))
    tokens, prefix = (torch.tensor([0, *itertools.accumulate(each)]) for each in (fresh, prefixes))
    bounds, scores = ExtendBounds(tokens, prefix, slots, max(fresh)), ScoreScaling(0.1, cap)
    found = native.extend(q, k, v, keys, values, bounds, scores)
    expected = TorchAttention().extend(q, k, v, keys, values, bounds, scores)
    assert (found - expected).abs().max() < tolerance(native) * expected.abs().max()


@pytest.mark.parametrize("window", [ExactWindow(8), ExactWindow(5, 3), ExactWindow(0, 4), ExactWindow(0)], ids=str)
@pytest.mark.parametrize("cap", [0.0, 4.0])
def test_requests_that_live_under_a_window(
    native: NativeAttention, window: ExactWindow, cap: float, row_format: MakeRowFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_torch", None)  # the library reads all of it
    sides = formats(row_format, 2, 64, (4, 3), 1, 32)
    pool = WindowedPool(native, *sides, window, logit_cap=cap, tolerance=tolerance(native))
    live(pool)
    assert pool.num_compared > 100


@pytest.mark.parametrize("by_cache", [False, True])
def test_a_window_whose_copies_have_gaps(native: NativeAttention, by_cache: bool, row_format: MakeRowFormat) -> None:
    sides = formats(row_format, 2, 64, (4, 3), 1, 32)
    pool = WindowedPool(native, *sides, ExactWindow(8, 2), tolerance=tolerance(native))
    request = pool.begin(1)
    pool.extend((request, 20))
    ring = pool.rings[0]
    assert ring is not None
    for gap in (0, 20):  # a sink, and one of the last eight
        ring.positions[1, ring.places(torch.tensor([gap]))] = EMPTY
        request.own.remove(gap)
        pool.extend((request, 5), by_cache=by_cache)
    assert pool.num_compared == 30


@pytest.mark.parametrize("where", WITH_NAN)
def test_nan_is_seen_by_its_request_and_by_no_other(
    native: NativeAttention, where: str, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    assert_nan_is_seen_by_its_request_alone(native.decode, where, row_format, poisoned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_integers_where_queries_have_16_bits(
    dtype: torch.dtype, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    best = runnable_sets()[0]
    if compiler() is None or not best.has_integer_products:
        pytest.skip("no library here has integer products")
    keys, values = (poisoned(row_format(2, 64, 4), 10) for _ in range(2))
    for stored in (keys, values):
        written(stored, torch.arange(10), 1)
    q = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    by_default, *others = (NativeAttention(best.name, integer_products=integers) for integers in (None, True, False))
    spans = Spans(torch.tensor([0, 9]), torch.arange(2), torch.arange(9))
    # Before outputs are rounded to the dtype of queries, which hides how products differ.
    parts = [native._of_rows(q, keys, values, spans, ScoreScaling(0.1), False) for native in (by_default, *others)]
    assert torch.equal(parts[0].output, parts[1].output) == (dtype == torch.bfloat16)
    assert torch.equal(parts[0].output, parts[2].output) == (dtype == torch.float32)


def test_results_go_where_they_are_asked_for_in_the_dtype_of_the_queries(
    native: NativeAttention, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    keys, values = (poisoned(row_format(2, 64, 4), 10) for _ in range(2))
    for stored in (keys, values):
        written(stored, torch.arange(10), 1)
    q = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty_like(q)
    indptr, slots = torch.tensor([0, 9], dtype=torch.int32), torch.arange(9, dtype=torch.int32)
    assert native.decode(q, keys, values, indptr, slots, ScoreScaling(0.1), out=out) is out
    assert torch.equal(out, native.decode(q, keys, values, indptr, slots, ScoreScaling(0.1)))
    assert native.decode(q[:0], keys, values, indptr[:1], slots, ScoreScaling(0.1)).shape == (0, 4, 64)
    assert native.read_prefix(q, keys, values, ExtendBounds(indptr, indptr, slots, 9)) is None


@pytest.mark.parametrize(
    ("indptr", "slots", "refusal"),
    [
        ([0, 3], [0, 1, 10], "a token slot lies outside of the pool"),
        ([0, 3], [0, -1, 2], "a token slot lies outside of the pool"),
        ([0, 4], [0, 1, 2], "^the bounds of requests fall, or lie outside of their slots or queries$"),
        ([2, 1], [0, 1, 2], "^the bounds of requests fall, or lie outside of their slots or queries$"),
        ([-1, 2], [0, 1, 2], "^the bounds of requests fall, or lie outside of their slots or queries$"),
        ([0], [0], "1 requests need 2 bounds"),
    ],
)
def test_slots_and_bounds_outside_of_memory_are_refused(
    native: NativeAttention, indptr: list[int], slots: list[int], refusal: str, row_format: MakeRowFormat,
    poisoned: MakePoisoned,
) -> None:  # fmt: skip
    keys, values = (poisoned(row_format(1, 64, 4), 10) for _ in range(2))
    with pytest.raises(CacheError, match=refusal):
        native.decode(torch.zeros(1, 2, 64), keys, values, torch.tensor(indptr), torch.tensor(slots), ScoreScaling(0.1))


@pytest.mark.parametrize("window", [ExactWindow(8), ExactWindow(5, 3), ExactWindow(0, 4), ExactWindow(0)], ids=str)
def test_copies_of_a_step_are_those_of_the_ring(native: NativeAttention, window: ExactWindow) -> None:
    generator = torch.Generator().manual_seed(1)
    rings = [ring_of(window, num_requests=4) for _ in range(2)]
    requests = torch.tensor([3, 0, 2], dtype=torch.int32)
    for past in range(12):
        rows = torch.tensor([0, past + 1, past + 3, past + 3, 99], dtype=torch.int32)  # the last request has no tokens
        k, v = (torch.randn(5, 2, 24, generator=generator)[:, :, ::2] for _ in range(2))
        new = NewTokens(requests[: 2 + past % 2], rows[: 3 + past % 2])
        native.store_copies(rings[0], new, k, v)
        rings[1].store(NewTokens(requests[:2], rows[:3]), k, v)
    for name in ("keys", "values", "positions"):
        assert torch.equal(getattr(rings[0], name), getattr(rings[1], name))


def ring_of(window: ExactWindow, num_requests: int) -> ExactRing:
    shape = (num_requests, window.num_tokens)
    copies = [torch.zeros(*shape, 2, 12, dtype=torch.bfloat16) for _ in range(2)]
    return ExactRing(*copies, torch.full(shape, EMPTY, dtype=torch.int32), window)


OUTSIDE_OF_COPIES = "^the slot of a request lies outside of the copies of an exact window$"


def test_request_slots_and_places_outside_of_a_window_are_refused(
    native: NativeAttention, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    keys, values = (poisoned(row_format(2, 12, 16), 10, torch.bfloat16) for _ in range(2))
    ring, rows, q = ring_of(ExactWindow(5, 3), num_requests=4), torch.tensor([0, 1]), torch.zeros(1, 4, 12)
    for outside in (-1, 4):
        window = WindowReads(ring, torch.tensor([outside]))
        with pytest.raises(CacheError, match=OUTSIDE_OF_COPIES):
            native.decode(q, keys, values, rows, torch.tensor([0]), ScoreScaling(0.1), window=window)
        with pytest.raises(CacheError, match=OUTSIDE_OF_COPIES):
            native.store_copies(ring, NewTokens(window.requests, rows), q[:, :2], q[:, :2])
    longer = replace(ring, window=ExactWindow(6, 3))
    with pytest.raises(CacheError, match=r"^the places of an exact window are not those of its copies$"):
        native.store_copies(longer, NewTokens(torch.tensor([0]), rows), q[:, :2], q[:, :2])
    others = poisoned(row_format(2, 40, 16), 10, torch.bfloat16)
    with pytest.raises(CacheError, match=r"copies of \[2, 12\] do not fit rows of \[2, 40\]"):
        native.decode(q, keys, others, rows, torch.tensor([0]), ScoreScaling(0.1), window=window)


def test_scores_of_sinks_are_read_in_every_dtype(
    native: NativeAttention, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    keys, values = (poisoned(row_format(2, 64, 4), 10) for _ in range(2))
    for stored in (keys, values):
        written(stored, torch.arange(10), 1)
    q, indptr, slots = torch.ones(1, 4, 64), torch.tensor([0, 9]), torch.arange(9)
    sinks = torch.tensor([0.5, -1.0, 2.0, 30.0], dtype=torch.bfloat16)
    found, same = (
        native.decode(q, keys, values, indptr, slots, ScoreScaling(0.1, 0.0, scores))
        for scores in (sinks, sinks.float())
    )
    assert torch.equal(found, same)
    assert not torch.equal(found, native.decode(q, keys, values, indptr, slots, ScoreScaling(0.1)))
    with pytest.raises(CacheError, match=r"4 heads have \[3\] scores of sinks"):
        native.decode(q, keys, values, indptr, slots, ScoreScaling(0.1, 0.0, sinks[:3]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_are_rounded_as_torch_rounds(
    native: NativeAttention, dtype: torch.dtype, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    keys, values = (poisoned(row_format(2, 64, 16), 1, torch.float32) for _ in range(2))
    numbers = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-45, 6, 64)
    numbers[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])
    keys.write(torch.tensor([0]), torch.zeros(1, 2, 64))
    values.write(torch.tensor([0]), numbers)  # of one token, whose weight is one
    found = native.decode(
        torch.ones(1, 2, 64, dtype=dtype), keys, values, torch.tensor([0, 1]), torch.tensor([0]), ScoreScaling(1.0)
    )
    assert torch.equal(found.nan_to_num(7.0, 8.0, 9.0), saturated(numbers, dtype).nan_to_num(7.0, 8.0, 9.0))


def test_rows_that_it_cannot_read_are_refused_with_their_layer(native: NativeAttention) -> None:
    fp8 = RowFormat(1, 64, QuantSpec(8, fp8=True))
    rows = PackedRows(torch.zeros(3, 64, dtype=torch.uint8), fp8)
    with pytest.raises(ServingError, match="layer 0 of this rank: attention on a processor has no fp8 rows"):
        native.prepare([(rows, rows)], 2, 1)


def test_queries_of_another_geometry_are_refused(
    native: NativeAttention, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    keys, values = (poisoned(row_format(2, 64, 4), 10) for _ in range(2))
    with pytest.raises(CacheError, match="do not fit 2 heads of 64 channels"):
        native.decode(torch.zeros(1, 3, 64), keys, values, torch.tensor([0, 1]), torch.tensor([0]), ScoreScaling(0.1))
