"""The candidates that have an isolated KL, on how many sequences, and what it changes of their scores.

Knows nothing of models: what is measured comes in, see `kvtuner.calibration.isolated.forwards`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Final

from kvtuner.precision import SIDES, Side

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtuner.calibration.sensitivity import Candidate, CandidateScores

MEASURED_TRANSFORMS: Final = 2
"""The transforms of a layer and side that are measured: those that the Fisher score puts first."""
LARGEST_FISHER_RATIO: Final = 2.5
"""The Fisher score, as a multiple of the least, beyond which a transform is not measured."""
LAYERS_TIMES_SEQUENCES: Final = 48
"""Layers times the sequences that their isolated KL is measured on, so that the forwards grow with depth alone."""
CHANCE: Final = 0.4
"""The logarithm of the factor between KL and Fisher score that is chance on one sequence: 1.5."""


def isolated_sequences(num_layers: int, num_sequences: int) -> int:
    """The sequences that isolated KL is measured on, of those of the calibration."""
    return min(num_sequences, -(-LAYERS_TIMES_SEQUENCES // num_layers))


def isolated_candidates(scores: Mapping[Candidate, CandidateScores]) -> list[Candidate]:
    """The candidates whose isolated KL decides something: at the narrowest width the first few transforms by Fisher.

    Errors are largest there, and the Fisher score is local. Above, it is the KL, see `with_isolated_kl`.
    """
    isolated: list[Candidate] = []
    for (_, _, bits), alternatives in _by_place(scores).items():
        if bits > min(candidate.bits for candidate in scores):
            continue
        most = LARGEST_FISHER_RATIO * scores[alternatives[0]].fisher
        first = alternatives[:MEASURED_TRANSFORMS]
        isolated += [first[0], *(candidate for candidate in first[1:] if scores[candidate].fisher <= most)]
    return isolated


@dataclass(frozen=True, slots=True)
class MeasuredScore:
    """What was measured of one candidate: two scores on the same sequences, the first of the calibration.

    Attributes:
        kl: Mean isolated KL per scored token, nats.
        fisher: The Fisher score.
        num_sequences: The number of these sequences.
    """

    kl: float
    fisher: float
    num_sequences: int


@dataclass(slots=True)
class CandidateRace:
    """Successive halving over sequences: a candidate that chance no longer lets win is measured on no more of them.

    Candidates of one layer, side and width compete by the Fisher score on all sequences times the ratio of KL to Fisher
    score on those with an isolated KL. After one batch, two, four and so on, a candidate loses whose product is beyond
    the least one of its place by more than two standard deviations of what chance still moves both ratios until the
    last batch. It keeps the score of its own sequences, of which chance explains more (`with_isolated_kl`); rarely that
    is the least one then.

    Attributes:
        scores: The scores of all candidates on all sequences of the calibration.
        fisher_of: The mean Fisher scores on the sequences of so many first batches, and the number of these sequences.
        num_sequences: The sequences of all batches.
        measured: What was measured last of each candidate.
    """

    scores: Mapping[Candidate, CandidateScores]
    fisher_of: Callable[[int], tuple[Mapping[Candidate, float], int]]
    num_sequences: int
    measured: dict[Candidate, MeasuredScore] = field(default_factory=dict)

    def losers(self, kl: Mapping[Candidate, float], num_batches: int) -> list[Candidate]:
        """The candidates that lose by their mean KL on so many first batches, which is kept in `measured`."""
        fisher, num_sequences = self.fisher_of(num_batches)
        estimates: dict[Candidate, float] = {}
        for candidate, value in kl.items():
            self.measured[candidate] = MeasuredScore(value, fisher[candidate], num_sequences)
            estimates[candidate] = self.scores[candidate].fisher * _ratio(value, fisher[candidate])
        least: dict[tuple[int, Side, int], float] = {}
        for candidate, estimate in estimates.items():
            place = place_of(candidate)
            least[place] = min(estimate, least.get(place, math.inf))
        chance = CHANCE * math.sqrt(1 / num_sequences - 1 / self.num_sequences)  # of a mean that will be one of all
        beyond = math.exp(2 * math.sqrt(2) * chance)  # two standard deviations of the difference of two
        return [candidate for candidate, e in estimates.items() if e > beyond * least[place_of(candidate)]]


def stages(num_batches: int) -> list[int]:
    """The numbers of batches after which candidates may lose, each twice the one before, and all batches last."""
    return [*(2**power for power in range((num_batches - 1).bit_length())), num_batches]


def with_isolated_kl(
    scores: Mapping[Candidate, CandidateScores], measured: Mapping[Candidate, MeasuredScore]
) -> dict[Candidate, CandidateScores]:
    """The scores with a KL for each candidate that was measured, and above for the transform that Fisher puts first.

    The Fisher score is the KL to second order, on all sequences. Of what was measured it is multiplied by the ratio of
    KL to Fisher score on the same sequences, less the factor that chance explains. So KL of few sequences tells where
    the second order is wrong, and no sequence decides by its own difficulty.
    """
    narrowest = min(candidate.bits for candidate in scores)
    kl = {
        alternatives[0]: scores[alternatives[0]].fisher
        for (_, _, bits), alternatives in _by_place(scores).items()
        if bits > narrowest
    }
    for candidate, score in measured.items():
        kl[candidate] = scores[candidate].fisher * _beyond_chance(score)
    return {candidate: replace(s, kl=kl.get(candidate, s.kl)) for candidate, s in scores.items()}


def _ratio(kl: float, fisher: float) -> float:
    """The factor from a Fisher score to a KL, one without error."""
    return kl / fisher if kl > 0 and fisher > 0 else 1.0


def _beyond_chance(score: MeasuredScore) -> float:
    """The factor from a Fisher score to a KL, nearer to one by what chance explains, a logarithm."""
    log_ratio = math.log(_ratio(score.kl, score.fisher))
    chance = CHANCE / math.sqrt(score.num_sequences)
    return math.exp(math.copysign(max(0.0, abs(log_ratio) - chance), log_ratio))


def place_of(candidate: Candidate) -> tuple[int, Side, int]:
    """The layer, side and width for which a candidate competes with others."""
    return candidate.layer, candidate.side, candidate.bits


def _by_place(scores: Mapping[Candidate, CandidateScores]) -> dict[tuple[int, Side, int], list[Candidate]]:
    """The candidates of every layer, side and width, in this order, by ascending Fisher score."""
    layers = sorted({candidate.layer for candidate in scores})
    widths = sorted({candidate.bits for candidate in scores})
    sides = [side for side in SIDES if any(candidate.side == side for candidate in scores)]  # a latent stands as keys
    return {
        place: sorted(
            (candidate for candidate in scores if place_of(candidate) == place),
            key=lambda candidate: scores[candidate].fisher,
        )
        for place in product(layers, sides, widths)
    }
