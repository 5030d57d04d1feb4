"""Candidates with an isolated KL: which, on how many sequences, and what few of them change of a score."""

from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING

import pytest

from kvtuner.calibration.isolated.candidates import (
    CHANCE,
    CandidateRace,
    MeasuredScore,
    isolated_candidates,
    isolated_sequences,
    stages,
    with_isolated_kl,
)
from kvtuner.calibration.sensitivity import Candidate, CandidateScores
from kvtuner.precision import SEARCHED_BITS, SIDES
from kvtuner.transforms import candidate_transforms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def scored(fisher: Callable[[int, int], float]) -> dict[Candidate, CandidateScores]:
    """The scores of two layers, Fisher's by layer and place of the transform; e_o says the opposite."""
    scores = {}
    for layer, side, bits in itertools.product(range(2), SIDES, SEARCHED_BITS):
        for rank, transform in enumerate(candidate_transforms(side)):
            value = fisher(layer, rank)
            scores[Candidate(layer, side, bits, transform)] = CandidateScores(1.0, 1.0, -value, value)
    return scores


def test_the_two_transforms_that_fisher_puts_first_are_measured_at_2_bits_and_none_above() -> None:
    # The best of layer 0 is its first transform, of layer 1 its last.
    scores = scored(lambda layer, rank: 1 + 0.1 * (rank if layer == 0 else 9 - rank))
    chosen = isolated_candidates(scores)
    assert len(chosen) == len(set(chosen)) == 2 * 2 * 2
    for layer, side in itertools.product(range(2), SIDES):
        order = candidate_transforms(side) if layer == 0 else tuple(reversed(candidate_transforms(side)))
        of = [(c.bits, c.transform) for c in chosen if (c.layer, c.side) == (layer, side)]
        assert of == [(2, order[0]), (2, order[1])]


def test_a_transform_far_behind_the_first_is_not_measured() -> None:
    for behind, count in ((2.49, 2), (2.51, 1)):
        chosen = isolated_candidates(scored(lambda _, rank, behind=behind: 1.0 if rank == 0 else behind))
        assert [len([c for c in chosen if (c.layer, c.side, c.bits) == (0, "k", 2)])] == [count]


def test_above_2_bits_the_least_fisher_score_stands_for_the_kl() -> None:
    scores = scored(lambda layer, rank: 1.0 + layer + rank)
    filled = with_isolated_kl(scores, {})
    with_kl = {(c.layer, c.side, c.bits, c.transform): s.kl for c, s in filled.items() if s.kl is not None}
    assert with_kl == {(layer, side, b, "none"): 1.0 + layer for layer in range(2) for side in SIDES for b in (4, 8)}


@pytest.mark.parametrize(("num_sequences", "chance"), [(1, 1.4918), (4, 1.2214), (16, 1.1052)])
def test_kl_of_few_sequences_moves_a_score_by_what_chance_does_not_explain(num_sequences: int, chance: float) -> None:
    scores = scored(lambda layer, rank: 1.0 + layer + rank)
    candidates = [c for c in isolated_candidates(scores) if (c.layer, c.bits, c.transform) == (0, 2, "none")]
    worse, better = candidates
    # Sequences three times as hard as all of them: only the ratio of both scores counts.

    def measured(kl: float) -> MeasuredScore:
        return MeasuredScore(3 * kl, 3.0, num_sequences)

    for factor in (chance * 0.999, 1 / chance * 1.001):
        assert with_isolated_kl(scores, {worse: measured(factor)})[worse].kl == 1.0
    filled = with_isolated_kl(scores, {worse: measured(5.0), better: measured(1 / 5.0)})
    assert filled[worse].kl == pytest.approx(5.0 / chance, rel=1e-3)
    assert filled[better].kl == pytest.approx(chance / 5.0, rel=1e-3)


def test_a_candidate_without_an_error_keeps_its_fisher_score() -> None:
    scores = scored(lambda layer, rank: 0.0 if rank == 0 else 1.0 + layer)
    first = isolated_candidates(scores)[0]
    assert with_isolated_kl(scores, {first: MeasuredScore(0.0, 0.0, 2)})[first].kl == 0.0


def test_layers_times_sequences_stay_the_same_as_models_get_deeper() -> None:
    assert [isolated_sequences(num_layers, 100) for num_layers in (1, 6, 12, 24, 48, 96)] == [48, 8, 4, 2, 1, 1]
    assert isolated_sequences(6, 3) == 3


def test_candidates_may_lose_after_one_batch_two_four_and_so_on() -> None:
    found = [stages(num_batches) for num_batches in (1, 2, 3, 4, 6, 8, 9)]
    assert found == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8], [1, 2, 4, 8, 9]]


FIRST, SECOND = (Candidate(0, "k", 2, name) for name in ("none", "hadamard"))
ELSEWHERE = Candidate(0, "v", 2, "none")


def race_of(
    fisher: Mapping[Candidate, float], on_first: Mapping[Candidate, float], num_sequences: int
) -> CandidateRace:
    """A race with Fisher scores on all sequences, and other ones on so many first ones."""
    scores = {candidate: CandidateScores(1.0, 1.0, 1.0, value) for candidate, value in fisher.items()}
    return CandidateRace(scores, lambda num_batches: (on_first, num_batches), num_sequences)


@pytest.mark.parametrize(("num_batches", "num_sequences"), [(1, 2), (1, 8), (2, 8), (4, 6)])
def test_a_candidate_loses_beyond_what_ratios_on_all_sequences_may_still_move(
    num_batches: int, num_sequences: int
) -> None:
    # The variance of a mean of n beside that of the mean of all N that it is a part of, for each of both.
    variance = 2 * 0.4**2 * (1 / num_batches - 1 / num_sequences)
    beyond = math.exp(2 * math.sqrt(variance))
    race = race_of(
        {FIRST: 1.0, SECOND: 1.0, ELSEWHERE: 1.0}, dict.fromkeys((FIRST, SECOND, ELSEWHERE), 1.0), num_sequences
    )
    assert race.losers({FIRST: 1.0, SECOND: beyond * 0.999, ELSEWHERE: 0.01}, num_batches) == []
    assert race.losers({FIRST: 1.0, SECOND: beyond * 1.001, ELSEWHERE: 0.01}, num_batches) == [SECOND]
    assert race.measured[SECOND] == MeasuredScore(beyond * 1.001, 1.0, num_batches)


def test_a_race_is_between_fisher_scores_of_all_sequences_times_the_ratio_on_some() -> None:
    # The first sequences are three times as hard for the second candidate, by Fisher score and by KL alike.
    race = race_of({FIRST: 1.0, SECOND: 1.0}, {FIRST: 1.0, SECOND: 3.0}, 8)
    assert race.losers({FIRST: 1.0, SECOND: 3.0}, 1) == []
    assert race.losers({FIRST: 1.0, SECOND: 1.0}, 4) == [FIRST]


def raced(
    ratios: Mapping[Candidate, Sequence[float]], fisher: Mapping[Candidate, Sequence[float]]
) -> tuple[dict[Candidate, CandidateScores], int]:
    """The scores that a race over batches of one sequence ends with, and the forwards that it took."""
    num_batches = len(next(iter(ratios.values())))
    on_first = {count: {c: math.fsum(values[:count]) / count for c, values in fisher.items()} for count in range(1, 9)}
    scores = {c: CandidateScores(1.0, 1.0, 1.0, math.fsum(values) / len(values)) for c, values in fisher.items()}
    race = CandidateRace(scores, lambda count: (on_first[count], count), num_batches)
    left, forwards, before = list(ratios), 0, 0
    for count in stages(num_batches):
        forwards += len(left) * (count - before)
        kl = {c: math.fsum(r * f for r, f in zip(ratios[c][:count], fisher[c], strict=False)) / count for c in left}
        lost = race.losers(kl, count)
        left, before = [c for c in left if c not in lost], count
    return with_isolated_kl(scores, race.measured), forwards


@pytest.mark.parametrize(("num_batches", "most_forwards"), [(2, 0.95), (5, 0.85), (6, 0.8), (8, 0.8)])
def test_races_choose_as_whole_measurements_do_in_fewer_forwards(num_batches: int, most_forwards: float) -> None:
    draw = random.Random(num_batches)
    same, forwards, lost, trials = 0, 0, [], 1500
    for _ in range(trials):
        behind, hard = {FIRST: 1.0, SECOND: draw.uniform(1.0, 2.5)}, [draw.lognormvariate(0, 1) for _ in range(16)]
        fisher = {c: [behind[c] * sequence for sequence in hard] for c in behind}
        true = {c: math.exp(draw.gauss(0, 0.3)) for c in behind}
        ratios = {c: [true[c] * math.exp(draw.gauss(0, CHANCE)) for _ in range(num_batches)] for c in behind}
        found, taken = raced(ratios, fisher)
        on_all = {}
        for c in behind:
            own = fisher[c][:num_batches]
            kl = math.fsum(map(math.prod, zip(own, ratios[c], strict=True)))
            on_all[c] = MeasuredScore(kl / num_batches, math.fsum(own) / num_batches, num_batches)
        whole = with_isolated_kl(found, on_all)
        chosen, best = (min(behind, key=lambda c: scores[c].kl or 0.0) for scores in (found, whole))
        same, forwards = same + (chosen == best), forwards + taken
        lost.append((whole[chosen].kl or 0.0) / (whole[best].kl or 1.0))
    assert same / trials > 0.97
    assert sum(lost) / trials < 1.005
    assert forwards <= most_forwards * 2 * num_batches * trials
