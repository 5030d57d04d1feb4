"""Questions asked of every way to store the cache, marked, journalled and compared."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.evaluation.paired import Marks, mcnemar
from kvtuner.evaluation.questions import Problem, arithmetic, needles, recall
from kvtuner.exported_configs.evaluation import Cell, Difference, Result
from kvtuner.run_folder import sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtuner.evaluation.offline import Offline
    from kvtuner.evaluation.subjects import Subject
    from kvtuner.exported_configs.evaluation import Level
    from kvtuner.run_folder import RunFolder

JOURNAL: Final = "answers.jsonl"


@dataclass(frozen=True, slots=True)
class Exam:
    """Problems of one kind, of one length, at one place.

    Attributes:
        level: which kind.
        num_tokens: of their contexts, about; None where they have a length of their own.
        position: of a context's first token.
        problems: the same for every way.
    """

    level: Level
    num_tokens: int | None
    position: int
    problems: tuple[Problem, ...]

    @property
    def num_questions(self) -> int:
        """Of all problems."""
        return sum(len(problem.questions) for problem in self.problems)


def make_exams(
    levels: Sequence[Level],
    lengths: Sequence[int],
    positions: Sequence[int],
    *,
    count_tokens: Callable[[str], int],
    filler: str,
    num_problems: int,
    num_questions: int,
    seed: int,
) -> list[Exam]:
    """Recall and needles at every length, arithmetic at every position; each level draws by itself.

    Args:
        levels: which of these.
        lengths: of contexts, tokens.
        positions: of arithmetic's first token.
        count_tokens: of a text.
        filler: text that needles are hidden in.
        num_problems: contexts of each length or position.
        num_questions: after each context.
        seed: of everything drawn.
    """

    def problem(level: Level, rng: random.Random, length: int) -> Problem:
        if level == "recall":
            return recall(rng, count_tokens, length, num_questions)
        if level == "needle":
            return needles(rng, count_tokens, length, num_questions, filler)
        return arithmetic(rng, num_questions)

    places: dict[Level, list[tuple[int | None, int]]] = {
        "recall": [(length, 0) for length in lengths],
        "needle": [(length, 0) for length in lengths],
        "arithmetic": [(None, position) for position in positions],
    }
    exams = []
    for level in levels:
        for length, position in places[level]:
            rng = random.Random(f"{seed} {level} {length}")  # the same problems at every position
            problems = tuple(problem(level, rng, length or 0) for _ in range(num_problems))
            exams.append(Exam(level, length, position, problems))
    return exams


class Examiner:
    """Marks answers; what was marked is journalled and never asked twice.

    Args:
        host: that answers.
        folder: of the journal.
        identity: of whatever decides answers besides the questions and the way.
    """

    def __init__(self, host: Offline, folder: RunFolder, identity: str) -> None:
        self._host, self._folder, self._identity = host, folder, identity
        self._known = {
            record["key"]: record["marks"] for record in folder.records(JOURNAL) if record.get("identity") == identity
        }

    def marks(self, exam: Exam, subject: Subject, on_problem: Callable[[], object] | None = None) -> Marks:
        """Of one way in one exam."""
        key = sha256_of(
            [exam.level, exam.position, subject.contestant.key, [
                [problem.context, [[question.text, question.answer] for question in problem.questions]]
                for problem in exam.problems
            ]]
        )  # fmt: skip
        if key not in self._known:
            marks, said = [], []
            for problem in exam.problems:
                answers = self._host.answers(subject, problem, offset=exam.position)
                said.append(answers)
                marks.append([q.is_right(answer) for q, answer in zip(problem.questions, answers, strict=True)])
                if on_problem is not None:
                    on_problem()
            about = {"level": exam.level, "tokens": exam.num_tokens, "position": exam.position, "way": subject.name}
            record = {"identity": self._identity, "key": key, **about, "marks": marks, "said": said}
            self._folder.append(JOURNAL, record)
            self._known[key] = marks
        return Marks(tuple(map(tuple, self._known[key])))


def accuracy_cell(exam: Exam, marked: Mapping[str, Marks], reference: str, seed: int) -> Cell:
    """Accuracies of all ways in one exam, each beside every other."""
    results = tuple(
        Result(
            subject=name,
            **_bounds(marks, seed),
            differences=tuple(
                _difference(other, marks, theirs, seed) for other, theirs in marked.items() if other != name
            ),
        )
        for name, marks in marked.items()
    )
    return Cell(
        level=exam.level, measure="accuracy", task=None, num_tokens=exam.num_tokens, position=exam.position,
        count=exam.num_questions, flag=marked[reference].flag, results=results,
    )  # fmt: skip


def _bounds(marks: Marks, seed: int) -> dict[str, float]:
    found = marks.interval(seed)
    return {"mean": found.mean, "low": found.low, "high": found.high}


def _difference(other: str, mine: Marks, theirs: Marks, seed: int) -> Difference:
    found = mine.minus(theirs, seed)
    return Difference(other=other, mean=found.mean, low=found.low, high=found.high, p_value=mcnemar(mine, theirs))
