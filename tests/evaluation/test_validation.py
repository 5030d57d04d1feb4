"""Schemes on the report split: measured once, and never with a value that is no number."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from kvtuner.calibration.batches import Batch
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.kl import TokenScores
from kvtuner.errors import NonFiniteActivationError
from kvtuner.evaluation.cache_scheme import Fp8Scheme
from kvtuner.evaluation.validation import BatchSums, SequenceSums, Validator, pooled
from kvtuner.geometry import ModelGeometry
from kvtuner.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


FP8 = Fp8Scheme.of(ModelGeometry(num_layers=2, num_attention_heads=8, num_kv_heads=4, head_dim=32, v_head_dim=32))


class Simulation:
    """Gives these divergences, [num_sequences, tokens], in batches of one sequence, and counts those it measured."""

    plan, num_at_once = ReadPlan("decode", 0), 1

    def __init__(self, kl: torch.Tensor, measured: list[int]) -> None:
        self.kl, self.measured = kl, measured
        tokens = torch.zeros(1, kl.shape[1], dtype=torch.int64)
        self.batches = [Batch(place, tokens, tokens) for place in range(len(kl))]

    def measure(self, specs: Any, *, places: Sequence[int]) -> TokenScores:
        self.measured += places
        kl = self.kl[list(places)]
        nll = torch.ones_like(kl)
        nll[:, -1] = torch.nan  # the last token has no next one
        return TokenScores(kl, torch.ones_like(kl), nll, torch.full((len(kl),), kl.shape[1]))


def validator(folder: RunFolder, kl: torch.Tensor, asked: dict[str, list[int]]) -> Validator:
    """One whose simulator gives these divergences; `asked` collects the batches that it measures, by offsets."""

    def simulate(split: str, offsets: str) -> Any:
        assert split == "report"
        return Simulation(kl, asked.setdefault(offsets, []))

    return Validator(cast("Any", SimpleNamespace(simulator=simulate)), folder, "mine")


def test_a_scheme_is_measured_once_per_folder_and_offsets(tmp_path: Path) -> None:
    folder, kl, asked = RunFolder(tmp_path), torch.full((2, 4), 0.5, dtype=torch.float64), {}
    for _ in range(2):
        found = validator(folder, kl, asked).measure(FP8, "small")
        assert (found.kl, found.nll_count, found.perplexity) == ((2.0, 2.0), (3, 3), math.e)
    assert asked == {"small": [0, 1]}
    validator(folder, kl, asked).measure(FP8, "large")
    assert asked == {"small": [0, 1], "large": [0, 1]}


def test_sums_are_of_sequences_and_quantiles_of_tokens() -> None:
    kl = torch.tensor([[0.0, 1.0, 2.0, 5.0], [3.0, 0.5, 0.25, 0.25]], dtype=torch.float64)
    agree = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    nll = torch.tensor([[1.0, 2.0, 3.0, math.nan], [0.5, 0.5, 1.0, math.nan]])
    scores = TokenScores(kl, agree, nll, torch.full((len(kl),), kl.shape[1]))
    sums = SequenceSums.of([BatchSums.of(part, 8) for part in scores.split([1, 1])])
    assert (sums.kl, sums.agree, sums.nll) == ((8.0, 4.0), (2.0, 3.0), (6.0, 2.0))
    assert (sums.count, sums.nll_count) == ((4, 4), (3, 3))
    assert sums.top1_agreement == 5 / 8
    assert sums.perplexity == pytest.approx(math.exp(8 / 6))
    assert sums.means("nll_nats_per_token").interval(seed=0).mean == 8 / 6, "the last tokens have no next one"
    assert sums.means("top1_agreement").interval(seed=0).mean == 5 / 8
    assert sums.kl_p99 == np.quantile(kl.numpy(), 0.99, method="higher")


@pytest.mark.parametrize(("sizes", "tokens"), [((1,), 1), ((2, 3), 20), ((1, 1, 1), 100), ((4, 1), 333), ((3,), 67)])
def test_the_99th_percentile_of_batches_is_that_of_all_tokens(sizes: tuple[int, ...], tokens: int) -> None:
    kl = torch.rand((sum(sizes), tokens), dtype=torch.float64, generator=torch.Generator().manual_seed(tokens)) ** 8
    kl[0] *= 100  # most of the largest lie in one batch
    counts = torch.full((len(kl),), tokens)
    counts[-1] = max(1, tokens - 3)  # as a sequence with images has
    kl[-1, counts[-1] :] = 0.0
    scores = TokenScores(kl, torch.ones_like(kl), torch.ones_like(kl), counts)
    parts = [BatchSums.of(part, int(counts.sum())) for part in scores.split(sizes)]
    assert sum(len(part.largest_kl) for part in parts) <= len(sizes) * (int(counts.sum()) // 100 + 2)
    assert SequenceSums.of(parts).kl_p99 == np.quantile(scores.scored_kl().numpy(), 0.99, method="inverted_cdf")


def test_pooling_adds_the_sums_of_each_sequence_and_keeps_the_larger_quantile() -> None:
    small = SequenceSums(kl=(1.0, 2.0), agree=(3.0, 4.0), nll=(8.0, 4.0), count=(4, 5), nll_count=(3, 4), kl_p99=0.25)
    large = SequenceSums(kl=(8.0, 16.0), agree=(2.0, 5.0), nll=(1.0, 2.0), count=(4, 5), nll_count=(3, 4), kl_p99=0.75)
    both = SequenceSums(kl=(9.0, 18.0), agree=(5.0, 9.0), nll=(9.0, 6.0), count=(8, 10), nll_count=(6, 8), kl_p99=0.75)
    assert pooled([small, large]) == pooled([large, small]) == both


def test_what_another_worker_has_measured_meanwhile_is_not_measured_again(tmp_path: Path) -> None:
    folder, kl, asked = RunFolder(tmp_path), torch.full((2, 4), 0.5, dtype=torch.float64), {}
    first, second = (validator(folder, kl, asked) for _ in range(2))
    assert first.measure(FP8, "small") == second.measure(FP8, "small")
    assert asked == {"small": [0, 1]}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_token_whose_kl_is_not_finite_is_an_error_that_is_not_measured_again(value: float, tmp_path: Path) -> None:
    folder, kl = RunFolder(tmp_path), torch.full((2, 4), 0.5, dtype=torch.float64)
    kl[1, 2] = value
    asked: dict[str, list[int]] = {}
    for _ in range(2):
        with pytest.raises(NonFiniteActivationError, match="fp8 has NaN or infinity at large position offsets"):
            validator(folder, kl, asked).measure(FP8, "large")
    assert asked == {"large": [0, 1]}
