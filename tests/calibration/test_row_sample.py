"""Samples of tokens: chances in proportion to importance, weights without bias, edges."""

from __future__ import annotations

import pytest
import torch

from kvtuner.calibration.row_sample import sample_rows


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def heavy_tailed(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, generator=generator(1)).mul(2.0).exp().square()


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (63, 63), (64, 64), (65, 64), (255, 64), (384, 96), (1536, 384)])
def test_one_token_of_four_is_drawn_and_sixty_four_at_least(tokens: int, rows: int) -> None:
    sample = sample_rows(heavy_tailed(tokens), 10, generator())
    assert len(sample.tokens) == len(sample.weights) == rows
    assert sample.population == tokens
    assert bool((sample.tokens.diff() > 0).all())
    assert 10 <= int(sample.tokens[0]) <= int(sample.tokens[-1]) < 10 + tokens
    assert bool((sample.weights >= 1).all())
    if rows == tokens:
        assert sample.weights.tolist() == [1.0] * tokens


@pytest.mark.slow
def test_a_token_is_drawn_as_often_as_its_importance_says_and_weighs_the_inverse() -> None:
    importance, num_samples = heavy_tailed(300), 4000
    drawn, weights = torch.zeros(300), torch.zeros(300)
    for seed in range(num_samples):
        sample = sample_rows(importance, 0, generator(seed))
        drawn[sample.tokens] += 1
        weights[sample.tokens] = sample.weights
    certain = weights == 1
    assert 0 < int(certain.sum()) < 75
    assert bool((drawn[certain] == num_samples).all())
    often = drawn > 40
    torch.testing.assert_close(1 / weights[often], drawn[often] / num_samples, rtol=0.5, atol=0.02)
    uncertain = often & ~certain
    ratio = (1 / weights[uncertain]) / importance[uncertain]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("goes_with", [True, False])
def test_weighted_sums_are_without_bias_and_steady_for_what_goes_with_the_importance(goes_with: bool) -> None:
    importance = heavy_tailed(400)
    noise = torch.rand(400, generator=generator(2)) + 0.5
    values = (importance if goes_with else torch.ones(400)) * noise
    sums = []
    for seed in range(2000):
        sample = sample_rows(importance, 0, generator(seed))
        sums.append(float((sample.weights * values[sample.tokens]).sum()))
    found = torch.tensor(sums, dtype=torch.float64)
    assert abs(float(found.mean()) - float(values.sum())) < 4 * float(found.std()) / len(found) ** 0.5
    if goes_with:
        assert float(found.std()) < 0.03 * float(values.sum())


def test_equal_importance_and_none_at_all_give_equal_weights() -> None:
    for importance in (torch.zeros(400), torch.full((400,), 3e-30), torch.ones(400)):
        sample = sample_rows(importance, 0, generator())
        torch.testing.assert_close(sample.weights, torch.full((100,), 4.0))
        assert bool((sample.tokens.diff() == 4).all())


def test_few_tokens_of_all_the_importance_are_certain_and_the_rest_is_still_drawn() -> None:
    importance = torch.zeros(400)
    importance[[3, 77, 200]] = torch.tensor([1e5, 1e6, 1e5])
    sample = sample_rows(importance, 0, generator())
    assert {3, 77, 200} <= set(sample.tokens.tolist())
    assert len(sample.tokens) == 100
    assert bool(torch.isfinite(sample.weights).all())
    assert float(sample.weights.max()) < 10
