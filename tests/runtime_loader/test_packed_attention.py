"""Drafts in trees read those that they follow, and attention sinks are one more score, in float64 too."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from windowed_requests import WindowedPool, live

from kvtuner.precision import ExactWindow
from kvtuner.runtime_loader.attention_backends import backend_for
from kvtuner.runtime_loader.packed_attention import ChunkMask, ExtendBounds, ScoreScaling

if TYPE_CHECKING:
    from fixture_types import MakePoisoned, MakeRowFormat
    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import PackedAttention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PREFIXES = (40, 0, 33, 7)
# A root has no parent; the second tree's drafts come before those that they follow.
PARENTS = ((None, 0, 0, 1, 1, 2, 3), (3, 3, 0, None, 2), (), (None, 0, 1))
PADDING = 2
TOLERANCE = {"torch": 1e-5, "cpu": 1e-5, "triton": 1e-2}


@pytest.fixture(params=TOLERANCE)
def attention(request: pytest.FixtureRequest) -> PackedAttention:
    device = torch.device("cpu")
    return backend_for(device, request.param).make(device)


def reads(parents: tuple[int | None, ...]) -> Tensor:
    """Whether drafts read one another, [drafts, drafts]: each itself, its parent, and so on."""
    found = torch.eye(len(parents), dtype=torch.bool)
    for draft, parent in enumerate(parents):
        while parent is not None:
            found[draft, parent] = True
            parent = parents[parent]
    return found


def exact(q: Tensor, k: Tensor, v: Tensor, scores: ScoreScaling) -> Tensor:
    """Attention of one query [num_heads, channels] over [tokens, num_kv_heads, channels], in float64."""
    grouped = q.double().unflatten(0, (k.shape[1], -1))
    weights = torch.softmax(scores(torch.einsum("hgd,thd->hgt", grouped, k.double())), dim=-1)
    return torch.einsum("hgt,thd->hgd", weights, v.double()).flatten(0, 1)


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("bits", [(4, 2), (8, 16)])
def test_each_draft_reads_those_that_it_follows(
    attention: PackedAttention, bits: tuple[int, int], cap: float, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    generator, heads, channels, gqa = torch.Generator().manual_seed(5), 2, 64, 3
    kinds = ("centered+balanced+hadamard", "hadamard")
    keys, values = (
        poisoned(row_format(heads, channels, width, kind), 100, torch.float32)
        for width, kind in zip(bits, kinds, strict=True)
    )
    slots, counts = torch.randperm(100, generator=generator)[: sum(PREFIXES)], [len(each) for each in PARENTS]
    for stored in (keys, values):
        stored.write(slots, torch.randn(len(slots), heads, channels, generator=generator))
    q, k, v = (
        torch.randn(sum(counts) + PADDING, each, channels, generator=generator) for each in (heads * gqa, heads, heads)
    )
    k[sum(counts) :] = v[sum(counts) :] = torch.nan
    trees = [reads(each) for each in PARENTS]
    # What a mask says of the prefix is not looked at: here it is noise.
    masks = [
        torch.cat((torch.rand(len(tree), past, generator=generator) < 0.5, tree), dim=1).flatten()
        for tree, past in zip(trees, PREFIXES, strict=True)
    ]
    starts = torch.tensor([0, *itertools.accumulate(map(len, masks))])
    tokens = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    prefix = torch.tensor([0, *itertools.accumulate(PREFIXES)], dtype=torch.int32)
    bounds = ExtendBounds(tokens, prefix, slots, max(counts), ChunkMask(torch.cat(masks), starts))
    scores = ScoreScaling(channels**-0.5, cap)
    found = attention.extend(q, k, v, keys, values, bounds, scores)
    for tree, (start, stop), of_prefix in zip(
        trees, itertools.pairwise(tokens.tolist()), slots.split(list(PREFIXES)), strict=True
    ):
        stored_k, stored_v = (side.read(of_prefix, torch.float32) for side in (keys, values))
        for draft in range(start, stop):
            own = tree[draft - start]
            read = [torch.cat((past, new[start:stop][own])) for past, new in ((stored_k, k), (stored_v, v))]
            expected = exact(q[draft], *read, scores)
            error = (found[draft] - expected).abs().max() / expected.abs().max()
            assert error < TOLERANCE[attention.name], draft


def test_a_chain_is_what_is_read_without_a_tree(
    attention: PackedAttention, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    generator = torch.Generator().manual_seed(1)
    keys, values = (poisoned(row_format(1, 64, bits), 40, torch.float32) for bits in (4, 2))
    slots = torch.arange(30)
    for stored in (keys, values):
        stored.write(slots, torch.randn(30, 1, 64, generator=generator))
    q, k, v = (torch.randn(9, heads, 64, generator=generator) for heads in (2, 1, 1))
    tokens, prefix = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 30, 30], dtype=torch.int32)
    chains = [torch.ones(4, 34, dtype=torch.bool).tril(30), torch.ones(5, 5, dtype=torch.bool).tril()]
    tree = ChunkMask(torch.cat([chain.flatten() for chain in chains]), torch.tensor([0, 4 * 34, 4 * 34 + 25]))
    scores = ScoreScaling(0.1)
    causal = attention.extend(q, k, v, keys, values, ExtendBounds(tokens, prefix, slots, 5), scores)
    by_tree = attention.extend(q, k, v, keys, values, ExtendBounds(tokens, prefix, slots, 5, tree), scores)
    torch.testing.assert_close(by_tree, causal, rtol=1e-5, atol=1e-5)


SINKS = torch.tensor([4.0, -torch.inf, 30.0, 0.5])
"""The scores of four heads: one of no weight, one that leaves almost nothing to tokens."""


@pytest.mark.parametrize(
    ("window", "kind"),
    [
        (ExactWindow(), "centered+hadamard"),
        pytest.param(ExactWindow(), "none", marks=pytest.mark.full),
        pytest.param(ExactWindow(8, 2), "centered+hadamard", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_requests_read_sinks_beside_rows_new_tokens_and_copies(
    attention: PackedAttention, window: ExactWindow, kind: str, row_format: MakeRowFormat
) -> None:
    k, v = row_format(2, 32, 4, kind), row_format(2, 32, 8, "hadamard")
    pool = WindowedPool(attention, k, v, window, tolerance=3 * TOLERANCE[attention.name], sink_scores=SINKS)
    live(pool)
    assert pool.num_compared == 150


def test_sinks_change_what_is_read_and_leave_nothing_to_a_request_without_tokens(
    attention: PackedAttention, row_format: MakeRowFormat
) -> None:
    pool = WindowedPool(attention, row_format(2, 32, 4), row_format(2, 32, 4), ExactWindow())
    pool.extend((pool.begin(1), 9))
    q, indptr, slots = torch.ones(2, 4, 32), torch.tensor([0, 9, 9]), torch.tensor(pool_slots(pool))
    plain, sunk = (
        attention.decode(q, pool.keys, pool.values, indptr, slots, ScoreScaling(0.1, 0.0, sinks))
        for sinks in (None, SINKS)
    )
    assert torch.equal(sunk[1], torch.zeros(4, 32))
    torch.testing.assert_close(sunk[0, 1], plain[0, 1], rtol=1e-6, atol=1e-6)
    assert sunk[0, 2].abs().max() < 1e-6 < 0.2 < plain[0, 2].abs().max()


def pool_slots(pool: WindowedPool) -> list[int]:
    """The token slots that are taken."""
    return list(pool.exact)
