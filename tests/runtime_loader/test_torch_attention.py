"""Attention over packed rows is attention over what the rows mean, in float64; and slots, spans and heads are right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from oracles.dequantized_attention import WITH_NAN, assert_nan_is_seen_by_its_request_alone, dequantized_decode

from kvtuner.errors import CacheError
from kvtuner.precision import PACKED_BITS
from kvtuner.quant import STEPS, QuantSpec, Step, Transform
from kvtuner.runtime_loader import torch_attention
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.runtime_loader.torch_attention import TorchAttention
from kvtuner.transforms import TransformKind, candidate_transforms

if TYPE_CHECKING:
    from fixture_types import MakePoisoned, MakeRowFormat
    from torch import Tensor

    from kvtuner.precision import WordBits

NUM_SLOTS = 64
HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}


@pytest.fixture(autouse=True, params=["one block", "several blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of a few tokens is read in one block, or in several of which the last is not full."""
    if request.param == "several blocks":
        monkeypatch.setattr(torch_attention, "BLOCK_KEYS", 5)
        monkeypatch.setattr(torch_attention, "BLOCK_QUERIES", 2)


def transform(name: str, num_heads: int, head_dim: int) -> Transform:
    kind = TransformKind.parse(name)
    generator = torch.Generator().manual_seed(3)
    mu = 2 * torch.randn(num_heads, head_dim, generator=generator)
    lam = torch.randn(num_heads, head_dim, generator=generator).exp().clamp(1 / 64, 64)
    return Transform(kind, mu.half() if kind.centered else None, lam.half() if kind.balanced else None)


def rows(num_heads: int, head_dim: int, spec: QuantSpec | None) -> PackedRows:
    row_format = RowFormat(num_heads, head_dim, spec)
    if spec is None:
        return PackedRows(torch.full((NUM_SLOTS, num_heads, head_dim), torch.nan), row_format)
    noise = torch.randint(0, 256, (NUM_SLOTS, row_format.row_bytes(torch.float32)), generator=torch.Generator())
    return PackedRows(noise.to(torch.uint8), row_format)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(q: Tensor, k: Tensor, v: Tensor, *, scale: float, logit_cap: float, causal: bool) -> Tensor:
    """Attention of [tokens, heads, channels] in float64; the queries are the last tokens."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if logit_cap:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + len(k) - len(q))
        scores = scores.masked_fill(mask, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def filled(
    heads: tuple[int, int], head_dim: int, k_spec: QuantSpec | None, v_spec: QuantSpec | None, lengths: list[int]
) -> tuple[PackedRows, PackedRows, list[Tensor], Tensor, Tensor]:
    """Rows of requests in random slots, their slots, and what the keys and values of slots read as."""
    keys, values = rows(heads[1], head_dim, k_spec), rows(heads[1], head_dim, v_spec)
    order = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))
    slots = list(order[: sum(lengths)].split(lengths))
    k, v = (3 * random(sum(lengths), heads[1], head_dim, seed=seed) + 1 for seed in (5, 6))
    TorchAttention().store(keys, values, torch.cat(slots), k, v)
    k_read = k if k_spec is None else k_spec.simulate(k)
    v_read = v if v_spec is None else v_spec.simulate(v)
    return keys, values, slots, k_read, v_read


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", candidate_transforms("k"))
@pytest.mark.parametrize("logit_cap", [0.0, 5.0])
def test_decode_is_attention_over_what_the_rows_mean(heads: tuple[int, int], name: str, logit_cap: float) -> None:
    head_dim, lengths = 80, [7, 1, 0, 12]
    k_spec = QuantSpec(4, transform(name, heads[1], head_dim))
    v_spec = QuantSpec(2, transform("hadamard", heads[1], head_dim))
    keys, values, slots, k, v = filled(heads, head_dim, k_spec, v_spec, lengths)
    q = random(len(lengths), heads[0], head_dim, seed=9)
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist(), 999])
    found = TorchAttention().decode(q, keys, values, indptr, torch.cat(slots), ScoreScaling(0.11, logit_cap))
    for request, (k_one, v_one) in enumerate(zip(k.split(lengths), v.split(lengths), strict=True)):
        if len(k_one) == 0:
            assert torch.equal(found[request], torch.zeros_like(found[request]))
            continue
        expected = exact(q[request : request + 1], k_one, v_one, scale=0.11, logit_cap=logit_cap, causal=False)[0]
        torch.testing.assert_close(found[request].double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


def flip(x: Tensor, _: Tensor | None) -> Tensor:
    """Negate every other channel, and double the first: a step that the Hadamard does not commute with."""
    signs = 1.0 - 2.0 * (torch.arange(x.shape[-1]) % 2)
    return x * signs.index_fill(0, torch.tensor([0]), 2.0)


def unflip(x: Tensor, _: Tensor | None) -> Tensor:
    return flip(x, None) * torch.ones(x.shape[-1]).index_fill(0, torch.tensor([0]), 0.25)


@pytest.mark.parametrize("name", ["none", "hadamard", "flipped", "flipped+hadamard", "hadamard+flipped"])
def test_decode_undoes_whatever_transform_values_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEPS, "flipped", Step(flip, unflip, unflip))
    heads, lengths = HEADS["gqa"], [7, 0, 12]
    v_spec = QuantSpec(4, Transform(TransformKind(name, "f", has_values=True)))
    keys, values, slots, k, v = filled(heads, 64, None, v_spec, lengths)
    q, indptr = random(3, heads[0], 64, seed=9), torch.tensor([0, 7, 7, 19])
    found = TorchAttention().decode(q, keys, values, indptr, torch.cat(slots), ScoreScaling(0.11))
    assert not found[1].any()
    for request, tokens in ((0, slice(0, 7)), (2, slice(7, 19))):
        exactly = exact(q[request : request + 1], k[tokens], v[tokens], scale=0.11, logit_cap=0.0, causal=False)[0]
        torch.testing.assert_close(found[request].double(), exactly, rtol=1e-5, atol=1e-5 * exactly.abs().max())


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("bits", [(None, None), (2, 8), (8, None), (None, 4), (3, 3)])
@pytest.mark.parametrize("logit_cap", [0.0, 5.0])
def test_extend_reads_the_prefix_from_rows_and_new_tokens_as_they_are(
    heads: tuple[int, int], bits: tuple[int | None, int | None], logit_cap: float
) -> None:
    head_dim, lengths, fresh = 64, [9, 0, 4], [1, 5, 3]
    k_transform = transform("centered+balanced+hadamard", heads[1], head_dim)
    k_spec = None if bits[0] is None else QuantSpec(bits[0], k_transform, symmetric=True)
    v_spec = None if bits[1] is None else QuantSpec(bits[1], group_size=32)
    keys, values, slots, k, v = filled(heads, head_dim, k_spec, v_spec, lengths)
    q = random(sum(fresh), heads[0], head_dim, seed=9)
    k_new, v_new = (random(sum(fresh), heads[1], head_dim, seed=seed) for seed in (10, 11))
    bounds = ExtendBounds(torch.tensor([0, 1, 6, 9]), torch.tensor([0, 9, 9, 13]), torch.cat(slots), 5)
    found = TorchAttention().extend(q, k_new, v_new, keys, values, bounds, ScoreScaling(0.13, logit_cap))
    parts = zip(q.split(fresh), k.split(lengths), v.split(lengths), k_new.split(fresh), v_new.split(fresh), strict=True)
    expected = torch.cat(
        [
            exact(
                q_one,
                torch.cat((k_one, k_two)),
                torch.cat((v_one, v_two)),
                scale=0.13,
                logit_cap=logit_cap,
                causal=True,
            )
            for q_one, k_one, v_one, k_two, v_two in parts
        ]
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("k_bits", PACKED_BITS)
@pytest.mark.parametrize(("num_groups", "word_bits", "symmetric"), [(1, 32, True), (2, 32, False), (2, 16, False)])
def test_groups_and_words_of_every_kind_are_folded_into_scores_and_sums(
    k_bits: int, num_groups: int, word_bits: WordBits, symmetric: bool
) -> None:
    head_dim, lengths, v_bits = 96, [3, 26], {2: 4, 3: 8, 4: 3, 8: 2}[k_bits]
    k_transform = transform("centered+hadamard", 2, head_dim)
    specs = [
        QuantSpec(bits, kind, head_dim // num_groups, symmetric, "least_squares", word_bits=word_bits)
        for bits, kind in ((k_bits, k_transform), (v_bits, transform("none", 2, head_dim)))
    ]
    keys, values, slots, _, _ = filled((4, 2), head_dim, *specs, lengths)
    q, indptr = random(2, 4, head_dim, seed=9), torch.tensor([0, 3, 29])
    scores = ScoreScaling(0.11)
    found = TorchAttention().decode(q, keys, values, indptr, torch.cat(slots), scores)
    expected = dequantized_decode(q, keys, values, indptr, torch.cat(slots), scores)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("where", WITH_NAN)
def test_nan_is_seen_by_its_request_and_by_no_other(
    where: str, row_format: MakeRowFormat, poisoned: MakePoisoned
) -> None:
    assert_nan_is_seen_by_its_request_alone(TorchAttention().decode, where, row_format, poisoned)


def test_results_come_in_the_dtype_of_the_queries() -> None:
    keys, values, slots, _, _ = filled((2, 2), 64, QuantSpec(4), None, [3])
    q = random(1, 2, 64, seed=0).bfloat16()
    assert TorchAttention().decode(q, keys, values, torch.tensor([0, 3]), slots[0], ScoreScaling(1.0)).dtype == q.dtype


def test_rows_are_no_tensor_that_other_code_could_read_as_keys() -> None:
    stored = rows(2, 64, QuantSpec(4))
    assert stored.shape == (NUM_SLOTS, 2, 64)
    with pytest.raises(TypeError):
        torch.empty(1) @ stored  # type: ignore[operator]


def test_too_few_bounds_are_refused() -> None:
    keys, values, slots, _, _ = filled((2, 2), 64, QuantSpec(4), None, [3])
    with pytest.raises(CacheError, match="2 requests need 3 bounds"):
        TorchAttention().decode(
            random(2, 2, 64, seed=0), keys, values, torch.tensor([0, 3]), slots[0], ScoreScaling(1.0)
        )
