"""The verdict on an evaluation: which tasks lose answers beyond their intervals. Knows nothing of outputs.

Terminal and pages say it in these words. The unquantized model is what answers are lost beside; fp8 stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME, SIGNIFICANT, Flag
from kvtuner.exported_configs.scheme_names import FP8, REFERENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.evaluation_record import Cell, Evaluation, PairedDifference

_ASK: Final = "Ask tasks: --levels recall,needle, or --tasks gsm8k."
POINTS: Final = {"accuracy": 100.0, "bleu": 1.0, "chrf": 1.0, "ter": -1.0}
"""The factors that turn measures of answers into points, of which more is better."""
_REASONS: Final[dict[Flag, str]] = {
    "floor": "the unquantized model is right too rarely",
    "ceiling": "the unquantized model hardly fails",
    "unread": "a server may not have read what it stored",
}
"""Why a cell hardly shows a loss, by its flag."""


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """The difference of the profile from the unquantized model in one cell, in points: below zero answers are lost.

    Attributes:
        fp8: The difference of fp8's mean from the unquantized model's; None where it was not asked.
        p_value: The probability of a difference as large by chance, by the signs of whole contexts.
        flag: Why the cell hardly shows a loss; None where it does.
    """

    title: str
    mean: float
    low: float
    high: float
    fp8: float | None
    p_value: float
    flag: Flag | None

    @property
    def is_loss(self) -> bool:
        """Whether answers are clearly lost: beyond the interval, and by the test of signs too."""
        return self.high < 0 and self.p_value < SIGNIFICANT

    @property
    def text(self) -> str:
        """The difference with its interval, and fp8's beside it."""
        beside = "" if self.fp8 is None else f", fp8 {self.fp8:+.1f}"
        return f"{self.title} {self.mean:+.1f} points [{self.low:+.1f}, {self.high:+.1f}]{beside}"


@dataclass(frozen=True, slots=True)
class EvaluationVerdict:
    """What an evaluation found, and what to do."""

    findings: tuple[str, ...]
    advice: str


def answer_differences(evaluation: Evaluation) -> list[AnswerDifference]:
    """The differences of all tasks that were asked of both, in the evaluation's order."""
    rows = []
    for cell in evaluation.cells:
        factor, difference = POINTS.get(cell.measure), _difference(cell, REFERENCE)
        if cell.level == "likelihood" or factor is None or difference is None:
            continue
        low, high = sorted((factor * difference.low, factor * difference.high))
        means = {result.scheme: factor * result.mean for result in cell.results}
        fp8 = means[FP8] - means[REFERENCE] if {FP8, REFERENCE} <= means.keys() else None
        mean, p_value = factor * difference.mean, difference.p_value
        rows.append(AnswerDifference(cell.title, mean, low, high, fp8, p_value, cell.flag))
    return rows


def evaluation_verdict(evaluation: Evaluation) -> EvaluationVerdict:
    """The verdict on an evaluation."""
    rows, others = answer_differences(evaluation), _not_compared(evaluation)
    if not rows:
        asks = "Ask what it can answer: shorter --lengths, or --tasks gsm8k." if others else _ASK
        nothing = f"No task was asked of both {PROFILE_SCHEME} and {REFERENCE}, so nothing says if answers hold."
        return EvaluationVerdict((nothing, *others), asks)
    if lost := [row for row in rows if row.is_loss]:
        beyond = f"{len(lost)} of {len(rows)} tasks {_verb(lost)} answers beyond the interval, beside {REFERENCE}"
        findings = [f"{beyond}: {'; '.join(row.text for row in lost)}."]
        if (chance := SIGNIFICANT / 2 * len(rows)) >= 0.5:
            findings.append(f"By chance {chance:.0f} of {len(rows)} would look so.")
        return EvaluationVerdict((*findings, *others), "Use a larger budget for such tasks.")
    seen = [row for row in rows if row.flag is None]
    if not seen:
        flags = {row.flag for row in rows}
        reasons = "; ".join(reason for flag, reason in _REASONS.items() if flag in flags)
        finding = f"No task that was asked can show a loss: {reasons}."
        return EvaluationVerdict((finding, *others), "Ask others: --lengths between those, or --tasks gsm8k.")
    worst = min(seen, key=lambda row: row.low)
    findings = [f"{len(seen)} {'task' if len(seen) == 1 else 'tasks'} can show a loss, and none is shown."]
    if blind := len(rows) - len(seen):
        findings.append(f"{blind} more hardly can.")
    if worst.low >= 0:
        return EvaluationVerdict((*findings, *others), "Use it.")
    findings.append(f"A loss of {-worst.low:.1f} points is not excluded: {worst.text}.")
    advice = "Use it where such a loss would do no harm; more questions narrow it."
    return EvaluationVerdict((*findings, *others), advice)


def _not_compared(evaluation: Evaluation) -> list[str]:
    """Sentences on what was not asked of the profile, and on measures that nothing says are better or worse."""
    skipped = [cell.title for cell in evaluation.cells if PROFILE_SCHEME in cell.skipped]
    unscored = [cell.title for cell in evaluation.cells if cell.level != "likelihood" and cell.measure not in POINTS]
    sentences = []
    if skipped:
        sentences.append(f"Skipped, as the unquantized model is right too rarely: {', '.join(skipped)}.")
    if unscored:
        sentences.append(f"Left out, as nothing says whether more is better: {', '.join(unscored)}.")
    return sentences


def _difference(cell: Cell, other: str) -> PairedDifference | None:
    return next((difference for difference in cell.differences if difference.other == other), None)


def _verb(lost: Sequence[AnswerDifference]) -> str:
    return "loses" if len(lost) == 1 else "lose"
