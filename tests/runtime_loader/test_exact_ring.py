"""Copies in places by request slot are read by their own request alone, in its window, whatever happens to slots."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from profile_samples import make_profile
from windowed_requests import WindowedPool, live

from kvtuner.errors import CacheError
from kvtuner.evaluation.cache_scheme import CacheScheme, RankLayout
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import ExactWindow, ScaleLayout
from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader.exact_ring import (
    COPIES_SHARE,
    EMPTY,
    LEAST_REQUESTS,
    ExactRings,
    NewTokens,
    WindowReads,
    largest_pool,
    most_requests,
    request_bytes,
)
from kvtuner.runtime_loader.packed_attention import NewKeys, PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import LayerFormat, RowFormat, rank_formats
from kvtuner.runtime_loader.torch_attention import TorchAttention
from kvtuner.search_spaces.budget import Budget
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOWS = (ExactWindow(1), ExactWindow(5), ExactWindow(32), ExactWindow(4, 2), ExactWindow(0, 3), ExactWindow(1024, 64))


def row_format(bits: int, kind: str, head_dim: int = 48, group_size: int | None = None) -> RowFormat:
    if bits == 16:
        return RowFormat(2, head_dim, None)
    parts, generator = TransformKind.parse(kind), torch.Generator().manual_seed(bits)
    mu = torch.randn(2, head_dim, generator=generator).half() if parts.centered else None
    lam = (0.4 * torch.randn(2, head_dim, generator=generator)).exp().half() if parts.balanced else None
    return RowFormat(2, head_dim, QuantSpec(bits, Transform(parts, mu, lam), group_size))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("k_bits", "v_bits", "logit_cap"), [(2, 4, 0.0), (4, 16, 5.0), (16, 2, 0.0)])
def test_each_query_reads_its_window_from_its_own_copies_and_the_rest_from_rows(
    window: ExactWindow, k_bits: int, v_bits: int, logit_cap: float
) -> None:
    k, v = row_format(k_bits, "centered+balanced+hadamard"), row_format(v_bits, "hadamard")
    pool = WindowedPool(TorchAttention(), k, v, window, logit_cap=logit_cap)
    live(pool)
    assert pool.num_compared > 50


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_by_cache_a_chunk_reads_itself_as_stored_but_for_the_window(window: ExactWindow) -> None:
    pool = WindowedPool(TorchAttention(), row_format(2, "centered"), row_format(4, "hadamard"), window)
    request, other = pool.begin(1), pool.begin(2)
    pool.extend((request, 21), (other, 3), padding=2, by_cache=True)
    pool.extend((other, 9), (request, 1), by_cache=True)
    pool.decode(request, other)
    hit = pool.begin(3, request.tokens[:20])
    pool.extend((hit, 14), (other, 2), by_cache=True)
    pool.decode(hit, other, request)
    assert pool.num_compared == 21 + 3 + 9 + 1 + 2 + 14 + 2 + 3


def test_the_oracle_sees_copies_of_a_former_request() -> None:
    pool = WindowedPool(TorchAttention(), row_format(2, "none"), row_format(2, "none"), ExactWindow(8))
    pool.rings.forget_former_requests = lambda _: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="request in slot"):
        live(pool)


def test_only_tokens_that_a_later_one_may_read_are_copied_each_to_its_place() -> None:
    window = ExactWindow(4, 2)
    layer = LayerFormat(row_format(2, "none"), row_format(16, "none"))
    rings = ExactRings([layer], window, 3, dtype=torch.bfloat16, device="cpu")
    ring = rings[0]
    assert ring is not None
    k, v = torch.randn(14, 2, 48), torch.randn(14, 2, 48)  # three tokens of no request
    ring.store(NewTokens(torch.tensor([2]), torch.tensor([5, 5]), torch.tensor([0, 11])), k, v)
    assert ring.positions.tolist() == [[EMPTY] * 6, [EMPTY] * 6, [0, 1, 8, 9, 10, 7]]
    for place, position in enumerate(ring.positions[2].tolist()):
        assert torch.equal(ring.keys[2, place], k[position].bfloat16())
        assert torch.equal(ring.values[2, place], v[position].bfloat16())
    at_hand, keys, _ = ring.read(2, 9)
    assert at_hand.tolist() == [0, 1, 8, 7]
    assert torch.equal(keys, k[at_hand].bfloat16())


def test_slots_are_emptied_for_new_requests_and_for_nobody_else() -> None:
    layers = [LayerFormat(row_format(2, "none"), row_format(4, "none"))] * 2
    rings = ExactRings(layers, ExactWindow(2), 3, dtype=torch.float32, device="cpu")
    tokens = NewTokens(torch.tensor([0, 1, 2]), torch.tensor([0, 6, 13, 21]))
    for layer in range(2):
        ring = rings[layer]
        assert ring is not None
        ring.store(tokens, torch.randn(3, 2, 48), torch.randn(3, 2, 48))
    generations = torch.tensor([0, 3, 0])
    rings.forget_former_requests(generations)
    for layer in range(2):
        ring = rings[layer]
        assert ring is not None
        assert ring.positions.tolist() == [[EMPTY, 5], [EMPTY, EMPTY], [EMPTY, 7]]
    generations[2] = 1
    rings.forget_former_requests(generations)
    rings.forget_former_requests(generations)
    assert rings[1].positions.tolist() == [[EMPTY, 5], [EMPTY, EMPTY], [EMPTY, EMPTY]]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_request_takes_the_bytes_that_are_allocated_for_it(dtype: torch.dtype) -> None:
    packed, native = row_format(2, "none", 80), row_format(16, "none", 80)
    layers = [LayerFormat(packed, native), LayerFormat(native, native), LayerFormat(native, packed)]
    window, num_requests = ExactWindow(7, 3), 5
    rings = ExactRings(layers, window, num_requests, dtype=dtype, device="cpu")
    assert rings[1] is None, "a layer of 16 bits has nothing to copy"
    # Two layers, two sides of two heads of 80 channels; a position of four bytes for each place of every layer.
    assert request_bytes(layers, window, dtype) == 10 * (2 * 2 * 2 * 80 * dtype.itemsize + 3 * 4)
    assert rings.num_bytes == num_requests * request_bytes(layers, window, dtype)


LAYERS = [LayerQuantization(*bits) for bits in ((4, 2), (16, 16), (16, 8), (3, 16), (16, 16), (8, 4), (2, 2), (16, 16))]


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(80, 80), (96, 48), (64, 32)])
@pytest.mark.parametrize("window", [ExactWindow(32), ExactWindow(7, 3), ExactWindow()], ids=str)
def test_profiles_and_ranks_count_the_copies_that_a_server_charges(
    window: ExactWindow, head_dim: int, v_head_dim: int
) -> None:
    geometry = ModelGeometry(len(LAYERS), 4, 2, head_dim, v_head_dim)
    layouts = {"k_layout": ScaleLayout(), "v_layout": ScaleLayout()}
    profile = make_profile(LAYERS, geometry=geometry, window=window, **layouts)
    whole = rank_formats(profile, range(len(LAYERS)))
    assert profile.window_bytes() == request_bytes(whole, window, torch.bfloat16)
    for tp_size, pp_size in ((1, 1), (2, 3)):
        stages = [geometry.layers_of_stage(stage, pp_size) for stage in range(pp_size)]
        charged = [request_bytes(rank_formats(profile, s, tp_size=tp_size), window, torch.bfloat16) for s in stages]
        ranks = RankLayout.of(geometry, tp_size=tp_size, pp_size=pp_size)
        assert ranks.window_bytes(profile.pairs, window) == max(charged)


@pytest.mark.parametrize("requests", ["32x4000", "5x64", "3x1000"])
@pytest.mark.parametrize("window", [ExactWindow(32), ExactWindow(7, 3)], ids=str)
def test_memory_is_kept_where_a_server_has_it_for_rows_and_copies(window: ExactWindow, requests: str) -> None:
    geometry = ModelGeometry(len(LAYERS), 4, 2, 80, 96)
    profile = make_profile(LAYERS, geometry=geometry, window=window, k_layout=ScaleLayout(), v_layout=ScaleLayout())
    formats = rank_formats(profile, range(len(LAYERS)))
    count, tokens = map(int, requests.split("x"))
    rows = sum(layer.bytes_per_token(torch.bfloat16) for layer in formats)
    needed = count * (rows * tokens + request_bytes(formats, window, torch.bfloat16))
    spare = count * tokens * (1 + 3)  # less than a byte of a token of the cap, and of each layer without copies

    def keeps(memory: int) -> bool:
        constraint = Budget.parse(f"{memory}B@{requests}").constraint(geometry, window=window)
        scheme = CacheScheme(name="c", pairs=profile.pairs, rows=geometry.row_shape(), key="c")
        assert scheme.keeps(constraint) == constraint.is_met(profile.pairs)
        return constraint.is_met(profile.pairs)

    assert keeps(needed + spare) and not keeps(needed - 1)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("asked", [None, 1, 8])
def test_a_pool_and_the_copies_of_its_requests_take_all_that_is_available_and_no_more(
    page_size: int, asked: int | None
) -> None:
    def bytes_of_requests(tokens: int) -> int:
        by_default = max(min(tokens // 3, 40), 20)  # SGLang's own rule, with other numbers
        return 700 * (1 + min(by_default if asked is None else asked, tokens // 2))

    for available in (*range(0, 60_000, 977), 100_000):
        fitting = [
            tokens
            for tokens in range(0, available // 90 + 1, page_size)
            if tokens == 0 or tokens * 90 + bytes_of_requests(tokens) <= available
        ]
        assert largest_pool(available, 90, page_size, bytes_of_requests) == fitting[-1]


@pytest.mark.parametrize("context_length", [4096, 131072])
@pytest.mark.parametrize("residual_length", [32, 128])
def test_where_nobody_says_how_many_requests_copies_leave_most_of_the_memory_to_rows(
    residual_length: int, context_length: int
) -> None:
    # Llama-3.1-8B at K4V4: 32 layers of 2 x 1,024 channels.
    token, request = 36_864, residual_length * 32 * (4 + 4096)

    def bytes_of_requests(tokens: int) -> int:
        of_sglang = max(min(tokens * 512 // context_length, 4096), 2048)
        return request * (1 + min(of_sglang, tokens // 2, most_requests(tokens, token, request)))

    for gib in (2, 5, 20, 80):
        available = gib << 30
        tokens = largest_pool(available, token, 1, bytes_of_requests)
        copies = bytes_of_requests(tokens)
        assert tokens * token + copies <= available
        assert copies <= max(available * COPIES_SHARE + request, (LEAST_REQUESTS + 1) * request)
        assert tokens * token >= (1 - COPIES_SHARE) * available - 2 * request - token or gib == 2


def test_copies_of_as_many_requests_as_run_by_default_take_their_share_of_rows_and_copies() -> None:
    rows, request = 7 * 800_000, 8_000
    assert most_requests(rows // 100, 100, request) == 100
    assert COPIES_SHARE == 1 / 8 == 100 * request / (rows + 100 * request)
    assert most_requests(rows // 100 - 1, 100, request) == 99
    assert most_requests(10, 100, request) == LEAST_REQUESTS


def test_groups_of_keys_per_channel_are_packed_once_a_request_fills_them() -> None:
    spec, generator = QuantSpec(2, token_group=16), torch.Generator().manual_seed(3)
    k, v, window = RowFormat(2, 48, spec), RowFormat(2, 32, None), ExactWindow(17, 2)
    keys = PackedRows(torch.full((160, k.row_bytes(torch.float32)), 255, dtype=torch.uint8), k)  # reads as NaN
    values = PackedRows.zeros(v, 160, torch.float32, "cpu")
    rings, attention = ExactRings([LayerFormat(k, v)], window, 3, dtype=torch.float32, device="cpu"), TorchAttention()
    ring = rings[0]
    assert ring is not None
    slots = {2: torch.cat((torch.arange(96, 160), torch.arange(16, 32))), 0: torch.arange(32, 96)}
    stored = {slot: (torch.empty(0, 2, 48), torch.empty(0, 2, 32)) for slot in slots}
    requests = torch.tensor(list(slots))
    for lengths in ((21, 3), (1, 1), (30, 12), (1, 1), (9, 1), *[(1, 1)] * 16):
        before = [len(stored[slot][0]) for slot in slots]
        fresh = [torch.randn(sum(lengths), 2, dim, generator=generator) for dim in (48, 32)]
        is_decode, bounds = max(lengths) == 1, _bounds(lengths)
        for number, slot in enumerate(slots):
            new = slice(bounds[number], bounds[number + 1])
            stored[slot] = tuple(torch.cat((old, x[new])) for old, x in zip(stored[slot], fresh, strict=True))
            values.write(slots[slot][before[number] : len(stored[slot][1])], fresh[1][new])
        read = [len(stored[slot][0]) if is_decode else past for slot, past in zip(slots, before, strict=True)]
        past = torch.cat([slots[slot][:tokens] for slot, tokens in zip(slots, read, strict=True)])
        if is_decode:
            step = NewTokens(requests, _bounds(read))
            ring.store(step, *fresh)
            attention.store_groups(keys, ring, step, past)
            q = torch.randn(2, 4, 48, generator=generator)
            found = attention.decode(
                q, keys, values, _bounds(read), past, ScoreScaling(0.2), window=WindowReads(ring, requests)
            )
            for number, (own_k, own_v) in enumerate(stored.values()):
                place, tokens = len(own_k) - 1, torch.arange(len(own_k))
                exact = (tokens > place - 17) | (tokens < 2)
                seen = torch.where(exact[:, None, None], own_k, spec.simulate(own_k)).double()
                scores = torch.einsum("hgd,thd->hgt", q[number].double().unflatten(0, (2, 2)), seen) * 0.2
                expected = torch.einsum("hgt,thd->hgd", scores.softmax(-1), own_v.double()).flatten(0, 1)
                assert (found[number] - expected).abs().max() < 1e-5
        else:
            at = torch.cat([slots[slot][b : b + n] for slot, b, n in zip(slots, before, lengths, strict=True)])
            step = NewTokens(requests, _bounds(read), bounds)
            attention.store_groups(keys, ring, step, past, NewKeys(at, fresh[0], max(lengths)))
            ring.store(step, *fresh)
        for slot, (own_k, _) in stored.items():
            full = len(own_k) // 16 * 16
            order = torch.randperm(full, generator=generator)
            found = keys.read(slots[slot][order], torch.float32)
            assert torch.equal(found, spec.simulate(own_k)[order])
            assert bool((keys.rows[slots[slot][full:]] == 255).all()), "nothing is packed before its group is full"
    ring.positions[2] = EMPTY
    with pytest.raises(CacheError, match="have no exact copies, though their group of keys per channel is not full"):
        attention.store_groups(keys, ring, NewTokens(requests, _bounds(read)), past)


def _bounds(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])
