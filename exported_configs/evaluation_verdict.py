"""The verdict on an evaluation: which tasks lose answers beyond their intervals. Knows nothing of outputs.

Terminal and pages say it in these words. The unquantized model is what answers are lost beside; fp8 stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.evaluation_record import Cell, Evaluation, PairedDifference

_UNQUANTIZED: Final = "bf16"
_FP8: Final = "fp8"
POINTS: Final = {"accuracy": 100.0, "bleu": 1.0, "chrf": 1.0, "ter": -1.0}
"""The factors that turn measures of answers into points, of which more is better."""
BLIND: Final = ("floor", "ceiling", "unread")
"""The flags of cells that hardly show a loss."""


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """The difference of the profile from the unquantized model in one cell, in points: below zero answers are lost.

    Attributes:
        fp8: The difference of fp8's mean from the unquantized model's; None where it was not asked.
        is_blind: Whether the cell hardly shows a loss.
    """

    title: str
    mean: float
    low: float
    high: float
    fp8: float | None
    is_blind: bool

    @property
    def is_loss(self) -> bool:
        """Whether answers are lost beyond the interval."""
        return self.high < 0

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
        factor, difference = POINTS.get(cell.measure), _difference(cell, _UNQUANTIZED)
        if cell.level == "likelihood" or factor is None or difference is None:
            continue
        low, high = sorted((factor * difference.low, factor * difference.high))
        means = {result.scheme: factor * result.mean for result in cell.results}
        fp8 = means[_FP8] - means[_UNQUANTIZED] if {_FP8, _UNQUANTIZED} <= means.keys() else None
        rows.append(AnswerDifference(_title(cell), factor * difference.mean, low, high, fp8, cell.flag in BLIND))
    return rows


def evaluation_verdict(evaluation: Evaluation) -> EvaluationVerdict:
    """The verdict on an evaluation."""
    rows = answer_differences(evaluation)
    if not rows:
        finding = f"No task was asked of both {PROFILE_SCHEME} and {_UNQUANTIZED}, so nothing says if answers hold."
        return EvaluationVerdict((finding,), "Ask tasks: --levels recall,needle, or --tasks gsm8k.")
    blind = sum(row.is_blind for row in rows)
    if lost := [row for row in rows if row.is_loss]:
        beyond = f"{len(lost)} of {len(rows)} tasks {_verb(lost)} answers beyond the interval, beside {_UNQUANTIZED}"
        finding = f"{beyond}: {'; '.join(row.text for row in lost)}."
        return EvaluationVerdict((finding,), "Use a larger budget for such tasks.")
    if blind == len(rows):
        finding = f"None of {len(rows)} tasks can show a loss: the unquantized model always or never answers them."
        return EvaluationVerdict((finding,), "Ask others: --lengths between those, or --tasks gsm8k.")
    seen = [row for row in rows if not row.is_blind]
    worst = min(seen, key=lambda row: row.low)
    findings = [f"No task loses answers beyond its interval, of {len(seen)} that can show it."]
    if blind:
        findings.append(f"{blind} more hardly can.")
    findings.append(f"A loss of {max(-worst.low, 0.0):.1f} points is not excluded: {worst.text}.")
    return EvaluationVerdict(tuple(findings), "Use it where such a loss would do no harm; more questions narrow it.")


def _difference(cell: Cell, other: str) -> PairedDifference | None:
    return next((difference for difference in cell.differences if difference.other == other), None)


def _verb(lost: Sequence[AnswerDifference]) -> str:
    return "loses" if len(lost) == 1 else "lose"


def _title(cell: Cell) -> str:
    """The task of a cell, with its length and position where it has them."""
    length = f"{cell.num_tokens:,} tokens" if cell.num_tokens else ""
    position = f"at {cell.position:,}" if cell.position else ""
    name = cell.task if cell.task and cell.level == "task" else " ".join(filter(None, (cell.level, cell.task)))
    return " ".join(filter(None, (name, length, position)))
