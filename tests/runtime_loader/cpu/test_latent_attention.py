"""Attention over packed latents is attention, in float64, over keys and values that the latents are expanded to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kvtuner.precision import ExactWindow
from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader import torch_attention
from kvtuner.runtime_loader.cpu import latent_attention
from kvtuner.runtime_loader.cpu.latent_attention import LatentAttention
from kvtuner.runtime_loader.exact_ring import ExactRings, NewTokens, WindowReads
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import LayerFormat, RowFormat
from kvtuner.transforms import TransformKind, candidate_transforms

if TYPE_CHECKING:
    from torch import Tensor

HEADS, RANK, ROPE, HEAD_DIM, SCALE, NUM_SLOTS = 3, 48, 10, 7, 0.2, 64
"""Query heads, channels of a latent and beside it, and of the keys and values that each head makes of a latent."""


@pytest.fixture(autouse=True, params=["one block", "several blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "several blocks":
        for module in (torch_attention, latent_attention):
            monkeypatch.setattr(module, "BLOCK_KEYS", 5)
        monkeypatch.setattr(torch_attention, "BLOCK_QUERIES", 2)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def transform(name: str) -> Transform:
    kind = TransformKind.parse(name)
    mu, lam = random(1, RANK, seed=3).half(), random(1, RANK, seed=4).exp().clamp(1 / 64, 64).half()
    return Transform(kind, mu if kind.centered else None, lam if kind.balanced else None)


class Expanding:
    """A layer's projections of latents to keys and values, and queries that absorb them."""

    def __init__(self, num_queries: int) -> None:
        self.projections = [random(HEADS, RANK, HEAD_DIM, seed=seed).double() for seed in (11, 12)]
        self.q, self.rotary_q = random(num_queries, HEADS, HEAD_DIM, seed=13), random(num_queries, HEADS, ROPE, seed=14)

    @property
    def absorbed(self) -> Tensor:
        queries = torch.einsum("qhd,hcd->qhc", self.q.double(), self.projections[0])
        return torch.cat((queries.float(), self.rotary_q), dim=-1)

    def attended(self, query: int, latents: Tensor, rotary: Tensor) -> Tensor:
        """The output [heads, head_dim] of one query over tokens [tokens, 1, channels], by keys and values."""
        keys, values = (torch.einsum("tc,hcd->htd", latents[:, 0].double(), to) for to in self.projections)
        scores = torch.einsum("hd,htd->ht", self.q[query].double(), keys)
        scores += torch.einsum("hd,td->ht", self.rotary_q[query].double(), rotary[:, 0].double())
        return torch.einsum("ht,htd->hd", (SCALE * scores).softmax(-1), values)

    def expanded(self, output: Tensor) -> Tensor:
        """What heads make of the latents [queries, heads, channels] that attention gives."""
        return torch.einsum("qhc,hcd->qhd", output.double(), self.projections[1])


def stored(spec: QuantSpec | None, lengths: list[int]) -> tuple[PackedRows, PackedRows, Tensor, Tensor, Tensor]:
    """Rows and rotary channels of requests in random slots, these, and both parts as they read."""
    latent_format = RowFormat(1, RANK, spec)
    keys = PackedRows.zeros(latent_format, NUM_SLOTS, torch.float32, "cpu")
    keys.rows.fill_(torch.nan if spec is None else 255)
    values = PackedRows(torch.full((NUM_SLOTS, 1, ROPE), torch.nan), RowFormat(1, ROPE, None))
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))[: sum(lengths)]
    latents, rotary = 2 * random(sum(lengths), 1, RANK, seed=5) + 1, random(sum(lengths), 1, ROPE, seed=6)
    LatentAttention().store(keys, values, slots, latents, rotary)
    return keys, values, slots, latents if spec is None else spec.simulate(latents), rotary


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5 * expected.abs().max().item())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("name", candidate_transforms("k"))
def test_absorbed_queries_read_what_heads_would_read_of_expanded_latents(bits: int, name: str) -> None:
    lengths = [7, 1, 0, 12]
    keys, values, slots, latents, rotary = stored(QuantSpec(bits, transform(name), group_size=24), lengths)
    layer, indptr = Expanding(len(lengths)), torch.tensor([0, 7, 8, 8, 20])
    found = LatentAttention().decode(layer.absorbed, keys, values, indptr, slots, ScoreScaling(SCALE))
    assert found.shape == (4, HEADS, RANK)
    assert not found[2].any()
    for query, tokens in ((0, slice(0, 7)), (1, slice(7, 8)), (3, slice(8, 20))):
        assert_near(layer.expanded(found)[query], layer.attended(query, latents[tokens], rotary[tokens]))


@pytest.mark.parametrize("spec", [None, QuantSpec(3, group_size=24)], ids=["16 bits", "3 bits"])
def test_new_tokens_read_their_prefix_from_rows_and_one_another_as_they_are(spec: QuantSpec | None) -> None:
    lengths, fresh = [9, 0, 4], [1, 5, 3]
    keys, values, slots, latents, rotary = stored(spec, lengths)
    new, new_rotary = random(sum(fresh), 1, RANK, seed=7), random(sum(fresh), 1, ROPE, seed=8)
    layer = Expanding(sum(fresh))
    bounds = ExtendBounds(torch.tensor([0, 1, 6, 9]), torch.tensor([0, 9, 9, 13]), slots, max(fresh))
    found = LatentAttention().extend(
        layer.absorbed, new, new_rotary, keys, values, bounds, ScoreScaling(SCALE), out=torch.empty(9, HEADS, RANK)
    )
    assert found.shape == (9, HEADS, RANK)
    prefixes = zip(latents.split(lengths), rotary.split(lengths), strict=True)
    for (past, past_rotary), first, last in zip(prefixes, (0, 1, 6), (1, 6, 9), strict=True):
        for query in range(first, last):
            seen = slice(first, query + 1)
            both = torch.cat((past, new[seen])), torch.cat((past_rotary, new_rotary[seen]))
            assert_near(layer.expanded(found)[query], layer.attended(query, *both))


def test_a_window_reads_its_copies_in_place_of_their_rows() -> None:
    window, spec = ExactWindow(3, 1), QuantSpec(2, group_size=24)
    keys, values, slots, latents, rotary = stored(spec, [11])
    exact = 2 * random(11, 1, RANK, seed=5) + 1
    rings = ExactRings([LayerFormat(keys.format, values.format)], window, 2, dtype=torch.float32, device="cpu")
    ring, one = rings[0], torch.tensor([1])
    assert ring is not None
    new = NewTokens(one, torch.tensor([0, 0]), torch.tensor([0, 11]))
    LatentAttention().store_copies(ring, new, exact, rotary)
    layer, kept = Expanding(1), torch.tensor([0, 8, 9, 10])
    found = LatentAttention().decode(
        layer.absorbed, keys, values, torch.tensor([0, 11]), slots, ScoreScaling(SCALE), window=WindowReads(ring, one)
    )
    latents[kept] = exact[kept]
    assert_near(layer.expanded(found)[0], layer.attended(0, latents, rotary))
