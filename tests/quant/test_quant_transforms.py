"""Transforms against scalar float32 loops, scipy's Hadamard matrices and float64 dot products."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import block_diag
from scipy.linalg import hadamard as scipy_hadamard
from torch import Tensor

from kvtuner.errors import PrecisionError
from kvtuner.quant import IDENTITY, Transform, hadamard, hadamard_block
from kvtuner.transforms import TransformKind, candidate_transforms, transform_names

BLOCKS = {1: 1, 5: 1, 6: 2, 40: 8, 64: 64, 72: 8, 80: 16, 96: 32, 128: 128, 192: 64, 256: 256}
ALL_NAMES = transform_names("k")
LAW_NAMES = (
    "none",
    "hadamard",
    "balanced",
    "balanced+hadamard",
    "centered",
    "centered+hadamard",
    "centered+balanced",
    "centered+balanced+hadamard",
)
"""The transforms that `scalar_apply` computes."""


def seeded(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def transform_of(name: str, num_kv_heads: int, head_dim: int, seed: int = 1) -> Transform:
    """A transform with outlier means and lambdas over the whole allowed range."""
    kind = TransformKind.parse(name)
    mu = (20 * seeded(num_kv_heads, head_dim, seed=seed)).half()
    lam = torch.exp2(4 * seeded(num_kv_heads, head_dim, seed=seed + 1)).clamp(1 / 64, 64).half()
    return Transform(kind, mu if kind.centered else None, lam if kind.balanced else None)


def scalar_butterfly(row: list[np.float32]) -> list[np.float32]:
    """The law's order of additions, one float32 at a time: h = 1, 2, 4, ..., then one multiplication."""
    out, size = list(row), len(row)
    h = 1
    while h < size:
        for start in range(0, size, 2 * h):
            for index in range(start, start + h):
                left, right = out[index], out[index + h]
                out[index], out[index + h] = left + right, left - right
        h *= 2
    factor = np.float32(1 / np.sqrt(np.float64(size)))
    return [value * factor for value in out]


def scalar_hadamard(row: list[np.float32]) -> list[np.float32]:
    block = BLOCKS[len(row)]
    return [y for start in range(0, len(row), block) for y in scalar_butterfly(row[start : start + block])]


def is_same_to_the_bit(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype == torch.float32 and torch.equal(left.view(torch.int32), right.view(torch.int32))


@pytest.mark.parametrize(("head_dim", "block"), BLOCKS.items())
def test_block_is_the_largest_power_of_two_that_divides_the_head(head_dim: int, block: int) -> None:
    assert hadamard_block(head_dim) == block


@pytest.mark.parametrize(("head_dim", "block"), BLOCKS.items())
def test_hadamard_is_scipys_matrix_on_every_block(head_dim: int, block: int) -> None:
    matrix = block_diag(*[scipy_hadamard(block) / np.sqrt(block)] * (head_dim // block))
    x = seeded(3, 2, head_dim, scale=10)
    expected = x.double().numpy() @ matrix.T
    # log2(256) + 1 float32 roundings of sums below sqrt(256) * 40
    np.testing.assert_allclose(hadamard(x).numpy(), expected, rtol=0, atol=9 * 2**-24 * 640)


@pytest.mark.parametrize("head_dim", BLOCKS)
def test_butterfly_adds_in_the_laws_order_to_the_last_bit(head_dim: int) -> None:
    x = torch.cat((seeded(4, head_dim), 1000 + seeded(2, head_dim, seed=3)))
    expected = [scalar_hadamard(list(row)) for row in x.numpy()]
    assert is_same_to_the_bit(hadamard(x), torch.from_numpy(np.array(expected, dtype=np.float32)))


def test_hadamard_of_a_batch_is_the_hadamard_of_its_tokens() -> None:
    x = seeded(7, 3, 96).transpose(0, 1)
    whole = hadamard(x)
    for head, token in itertools.product(range(3), range(7)):
        assert is_same_to_the_bit(whole[head, token], hadamard(x[head, token].clone()))
    assert hadamard(x[:0]).shape == (0, 7, 96)


@pytest.mark.parametrize("head_dim", [80, 96, 128])
def test_hadamard_undoes_itself(head_dim: int) -> None:
    x = seeded(5, head_dim)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=0, atol=1e-5)


def test_hadamard_reads_half_precision_as_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = seeded(3, 64).to(dtype)
        assert is_same_to_the_bit(hadamard(x), hadamard(x.float()))


@pytest.mark.parametrize("name", ALL_NAMES)
def test_every_kind_reads_back_what_it_writes(name: str) -> None:
    kind = TransformKind.parse(name)
    assert str(kind) == name
    assert (kind.centered, kind.balanced, kind.hadamard) == tuple(
        part in name.split("+") for part in ("centered", "balanced", "hadamard")
    )


def test_the_kinds_hold_all_combinations_of_the_three_steps() -> None:
    assert set(LAW_NAMES) <= set(ALL_NAMES)
    assert set(candidate_transforms("k")) <= set(ALL_NAMES)
    assert {"none", "hadamard"} <= set(candidate_transforms("v"))


def test_misordered_repeated_and_unknown_parts_are_refused() -> None:
    parts = ("centered", "balanced", "hadamard", "none")
    names = {"+".join(chosen) for size in (1, 2, 3) for chosen in itertools.product(parts, repeat=size)}
    refused = {*names - set(ALL_NAMES), "", "+", "Hadamard", " hadamard", "hadamard+", "+hadamard", "rotated"}
    assert len(names) == 4 + 16 + 64
    for name in refused:
        with pytest.raises(PrecisionError, match="in that order"):
            TransformKind.parse(name)


@pytest.mark.parametrize(("part", "field", "word"), [("centered", "mu", "mu"), ("balanced", "lam", "lambda")])
def test_transform_has_exactly_the_constants_of_its_kind(part: str, field: str, word: str) -> None:
    constant = torch.ones(2, 64, dtype=torch.float16)
    with pytest.raises(PrecisionError, match=f"{part} needs {word}"):
        Transform(TransformKind.parse(part))
    with pytest.raises(PrecisionError, match=f"none has no {word}"):
        Transform(TransformKind.parse("none"), **{field: constant})
    for wrong in (constant.float(), constant.bfloat16(), constant[0]):
        with pytest.raises(PrecisionError, match=f"{word} must be float16"):
            Transform(TransformKind.parse(part), **{field: wrong})


def scalar_apply(transform: Transform, x: np.ndarray) -> np.ndarray:
    """H((x - mu) * (1 / lambda)) of one token [num_kv_heads, head_dim], one float32 at a time."""
    rows = []
    for head, row in enumerate(x):
        values = list(row)
        if transform.mu is not None:
            values = [v - np.float32(m) for v, m in zip(values, transform.mu[head].numpy(), strict=True)]
        if transform.lam is not None:
            values = [
                v * (np.float32(1) / np.float32(lam))
                for v, lam in zip(values, transform.lam[head].numpy(), strict=True)
            ]
        rows.append(scalar_hadamard(values) if transform.kind.hadamard else values)
    return np.array(rows, dtype=np.float32)


@pytest.mark.parametrize("name", LAW_NAMES)
@pytest.mark.parametrize("head_dim", [64, 80, 96])
def test_apply_is_the_law_to_the_last_bit(name: str, head_dim: int) -> None:
    transform = transform_of(name, 2, head_dim)
    x = seeded(3, 2, head_dim, scale=30)
    expected = np.stack([scalar_apply(transform, token) for token in x.numpy()])
    assert is_same_to_the_bit(transform.apply(x), torch.from_numpy(expected))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ALL_NAMES), st.sampled_from([8, 80, 96, 128]), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_invert_undoes_apply(name: str, head_dim: int, num_heads: int, seed: int) -> None:
    transform = transform_of(name, num_heads, head_dim, seed=seed % 1000)
    x = seeded(2, num_heads, head_dim, seed=seed, scale=30)
    back = transform.invert(transform.apply(x))
    # A rotation spreads the largest stored channel's rounding over the block; lambda scales it up again.
    lam = torch.ones(1, 1) if transform.lam is None else transform.lam.float()
    atol = 1e-5 * transform.apply(x).abs().amax(dim=-1, keepdim=True) * lam + 2**-22 * (x.abs() + 100)
    assert ((back - x).abs() <= atol).all()


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 80), (7, 1, 96), (8, 2, 128)])
def test_transformed_query_times_stored_key_is_the_centered_score(
    name: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    transform = transform_of(name, num_kv_heads, head_dim)
    q, k = seeded(5, num_heads, head_dim, seed=7), seeded(5, num_kv_heads, head_dim, seed=8, scale=30)
    stored_q = transform.apply_to_query(q, num_kv_heads).double().numpy()
    stored_k = transform.apply(k).double().numpy()
    mu = np.zeros((num_kv_heads, head_dim)) if transform.mu is None else transform.mu.double().numpy()
    for token, head in itertools.product(range(5), range(num_heads)):
        kv_head = head * num_kv_heads // num_heads
        exact = q[token, head].double().numpy() * (k[token, kv_head].double().numpy() - mu[kv_head])
        score = float(stored_q[token, head] @ stored_k[token, kv_head])
        norms = np.linalg.norm(stored_q[token, head]) * np.linalg.norm(stored_k[token, kv_head])
        assert score == pytest.approx(exact.sum(), rel=0, abs=1e-6 * norms + 1e-9)


@pytest.mark.parametrize("name", transform_names("v"))
def test_weighted_sums_of_stored_values_read_back_as_sums_of_values(name: str) -> None:
    """What attention does in stored space: it sums values, and takes the sum back."""
    transform = Transform(TransformKind.parse(name))
    values, weights = seeded(9, 2, 80, scale=30), seeded(9, seed=4).softmax(0)
    summed = transform.invert(torch.einsum("t,thd->hd", weights, transform.apply(values)))
    expected = torch.einsum("t,thd->hd", weights.double(), values.double())
    torch.testing.assert_close(summed.double(), expected, rtol=0, atol=1e-5 * values.abs().max().item())


@pytest.mark.parametrize("name", ALL_NAMES)
def test_heads_of_a_rank_transform_like_the_whole_model(name: str) -> None:
    transform = transform_of(name, 4, 80)
    x, q = seeded(3, 4, 80, scale=30), seeded(3, 8, 80, seed=9)
    whole, whole_q, back = transform.apply(x), transform.apply_to_query(q, 4), transform.invert(x)
    for start, stop in ((0, 4), (0, 2), (2, 4), (1, 2), (3, 4)):
        rank = transform.heads(start, stop)
        assert rank.kind == transform.kind
        assert is_same_to_the_bit(rank.apply(x[:, start:stop]), whole[:, start:stop])
        assert is_same_to_the_bit(rank.invert(x[:, start:stop]), back[:, start:stop])
        rank_q = rank.apply_to_query(q[:, 2 * start : 2 * stop], stop - start)
        assert is_same_to_the_bit(rank_q, whole_q[:, 2 * start : 2 * stop])


def test_identity_only_widens_the_dtype() -> None:
    x = seeded(3, 2, 64).bfloat16()
    for y in (IDENTITY.apply(x), IDENTITY.invert(x), IDENTITY.apply_to_query(x, 1)):
        assert is_same_to_the_bit(y, x.float())


def test_transforms_leave_their_input_and_constants_alone() -> None:
    transform = transform_of("centered+balanced+hadamard", 2, 64)
    assert transform.mu is not None
    x = seeded(3, 2, 64)
    before, mu = x.clone(), transform.mu.clone()
    transform.invert(transform.apply(x))
    transform.apply_to_query(x, 2)
    assert torch.equal(x, before)
    assert torch.equal(transform.mu, mu)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 2, 64), (5,), (2, 1), (1, 96)])
def test_hadamard_leaves_its_input_alone_and_returns_contiguous_rows(shape: tuple[int, ...]) -> None:
    x = seeded(*shape)
    before = x.clone()
    assert hadamard(x).is_contiguous()
    assert torch.equal(x, before)
