"""The decode kernel over packed latents is attention, in float64, over what the rows hold."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader.cpu.latent_attention import LatentAttention
from kvtuner.runtime_loader.kernels.latents.triton_latents import TritonLatentAttention
from kvtuner.runtime_loader.packed_attention import PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.transforms import TransformKind, candidate_transforms

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LENGTHS = (0, 1, 33, 70)
"""No token, one, a block and one more, and splits of which the last is broken."""
# As in test_decode.py: queries and weights are rounded to fp16 once each.
TOLERANCE = 1e-2


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spec_of(bits: int, rank: int, name: str = "none", **more: object) -> QuantSpec:
    kind = TransformKind.parse(name)
    mu, lam = random(1, rank, seed=3).half(), (0.4 * random(1, rank, seed=4)).exp().half()
    return QuantSpec(bits, Transform(kind, mu if kind.centered else None, lam if kind.balanced else None), **more)


class Layer:
    """Latents and rotary channels of requests in slots of pages, whose other slots are poisoned."""

    def __init__(self, rank: int, rope: int, spec: QuantSpec | None, dtype: torch.dtype, page_size: int = 1) -> None:
        pages = [-(-length // page_size) for length in LENGTHS]
        order = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(1))[: sum(pages)]
        slots = [
            (page.unsqueeze(-1) * page_size + torch.arange(page_size)).flatten()[:length]
            for page, length in zip(order.split(pages), LENGTHS, strict=True)
        ]
        num_slots = (sum(pages) + 3) * page_size
        self.slots, self.indptr = torch.cat(slots), torch.tensor([0, *itertools.accumulate(LENGTHS)])
        self.latents = PackedRows.zeros(RowFormat(1, rank, spec), num_slots, dtype, "cpu")
        self.latents.rows.fill_(torch.nan if spec is None else 255)
        self.rotary = PackedRows(torch.full((num_slots, 1, rope), torch.nan, dtype=dtype), RowFormat(1, rope, None))
        # Scales that differ by orders of magnitude, and some that are subnormal.
        size = (1.5 * random(len(self.slots), 1, 1, seed=2)).exp()
        size[::7] = 1e-6
        self.latents.write(self.slots, (size * random(len(self.slots), 1, rank, seed=5)).to(dtype))
        self.rotary.write(self.slots, random(len(self.slots), 1, rope, seed=6).to(dtype))

    def scores(self, q: Tensor, scores: ScoreScaling) -> list[Tensor]:
        """The scores of each request in float64, [heads, tokens], of what rows hold."""
        sides = [side.read(self.slots, torch.float32).double()[:, 0] for side in (self.latents, self.rotary)]
        keys = torch.cat(sides, dim=-1).split(LENGTHS)
        return [scores(query @ tokens.T) for query, tokens in zip(q.double(), keys, strict=True)]

    def expected(self, q: Tensor, scores: ScoreScaling) -> Tensor:
        """Attention in float64 over what rows hold, [requests, heads, rank]."""
        latents = self.latents.read(self.slots, torch.float32).double()[:, 0].split(LENGTHS)
        outputs = []
        for found, values in zip(self.scores(q, scores), latents, strict=True):
            sinks = torch.zeros(len(found), 0) if scores.sink_scores is None else scores.sink_scores[:, None]
            outputs.append(torch.cat((found, sinks), dim=-1).softmax(-1)[:, : len(values)] @ values)
        return torch.stack(outputs)

    def decode(self, q: Tensor, scores: ScoreScaling) -> Tensor:
        attention = TritonLatentAttention(q.device)
        attention.prepare([(self.latents, self.rotary)], q.shape[1], len(LENGTHS))
        out = torch.full((*q.shape[:2], self.latents.format.head_dim), torch.nan, dtype=q.dtype)
        return attention.decode(q, self.latents, self.rotary, self.indptr, self.slots, scores, out=out)


def assert_agrees(layer: Layer, num_heads: int, cap: float = 0.0, *, has_sinks: bool = False) -> None:
    rank, rope = layer.latents.format.head_dim, layer.rotary.format.head_dim
    q = random(len(LENGTHS), num_heads, rank + rope, seed=9).to(layer.rotary.rows.dtype)
    # Latents of any size are keys too: scores of some twenty nats, as rounded queries move the largest by 5e-3 of it.
    scores = ScoreScaling(0.1 * (rank + rope) ** -0.5, cap)
    if has_sinks:  # of about the weight of all tokens of the longest request
        weight = layer.scores(q, scores)[-1].logsumexp(-1)
        scores = replace(scores, sink_scores=weight.float() + random(num_heads, seed=12))
    expected, found = layer.expected(q, scores), layer.decode(q, scores)
    assert (found[0] == 0).all()
    # Rounding is relative to what is stored, which lacks a mean: of a latent near 0 that is all there is.
    mean = layer.latents.transform.mu
    stored = expected if mean is None else expected - mean
    largest = stored.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1e-5)  # fp16 is rounded by 3e-8 at the least
    assert ((found - expected).abs() / largest).max().item() < TOLERANCE
    host = LatentAttention().decode(q, layer.latents, layer.rotary, layer.indptr, layer.slots, scores)
    assert ((found - host).abs() / largest).max().item() < TOLERANCE


@pytest.mark.parametrize("name", candidate_transforms("k"))
def test_every_transform(name: str) -> None:
    assert_agrees(Layer(64, 16, spec_of(4, 64, name), torch.float32), 3)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_every_width(bits: int) -> None:
    assert_agrees(Layer(64, 16, spec_of(bits, 64, "centered+balanced+hadamard"), torch.float32), 3)


@pytest.mark.parametrize(("bits", "groups"), [(2, 8), (3, 2), (3, 8), (4, 4), (8, 2)])
def test_groups_of_channels(bits: int, groups: int) -> None:
    spec = spec_of(bits, 96, "centered", group_size=96 // groups)
    assert_agrees(Layer(96, 16, spec, torch.float32), 5)


@pytest.mark.parametrize(("bits", "groups"), [(2, 4), (3, 1), (3, 8), (4, 2)])
def test_short_words_of_fitted_grids(bits: int, groups: int) -> None:
    spec = spec_of(bits, 80, "hadamard", group_size=80 // groups, fit="least_squares", word_bits=16)
    assert_agrees(Layer(80, 16, spec, torch.float32), 5)


@pytest.mark.parametrize(
    ("rank", "rope", "heads", "bits", "group_size"),
    [
        (48, 10, 3, 4, 12),
        (80, 20, 17, 4, 80),
        (512, 64, 16, 4, 128),
        pytest.param(512, 64, 16, 2, 64, marks=pytest.mark.slow),
        pytest.param(512, 64, 16, 8, 256, marks=pytest.mark.slow),
        pytest.param(512, 64, 128, 3, 128, marks=pytest.mark.slow),
    ],
)
def test_heads_and_channels_in_slots_of_pages(rank: int, rope: int, heads: int, bits: int, group_size: int) -> None:
    spec = spec_of(bits, rank, "centered+hadamard", group_size=group_size)
    assert_agrees(Layer(rank, rope, spec, torch.float16, page_size=16), heads)


@pytest.mark.parametrize("spec", [None, spec_of(3, 64, "centered+balanced+hadamard"), spec_of(4, 64, word_bits=16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_capped_scores_and_sinks(spec: QuantSpec | None, dtype: torch.dtype) -> None:
    layer = Layer(64, 16, spec, dtype, page_size=4)
    assert_agrees(layer, 4, cap=5.0)
    assert_agrees(layer, 4, cap=5.0, has_sinks=True)
    assert_agrees(layer, 4, has_sinks=True)


def test_slots_of_32_bits_are_read_as_those_of_64() -> None:
    layer = Layer(64, 16, spec_of(4, 64), torch.float32)
    layer.slots = layer.slots.int()
    assert_agrees(layer, 3)
