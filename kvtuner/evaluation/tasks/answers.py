"""Questions asked of every way to store the cache, marked, journalled and compared."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvtuner.errors import CorpusError
from kvtuner.evaluation.backends.endpoint import HitCount
from kvtuner.evaluation.cells import bounds
from kvtuner.evaluation.paired import Marks, mcnemar
from kvtuner.evaluation.tasks.questions import Problem, arithmetic, needles, recall
from kvtuner.exported_configs.profile.evaluation_record import PROFILE, Cell, PairedDifference, Result
from kvtuner.run_folder import sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtuner.evaluation.token_text import Text
    from kvtuner.exported_configs.profile.evaluation_record import Level
    from kvtuner.run_folder import RunFolder

JOURNAL: Final = "answers.jsonl"
ANSWERING: Final = 1
"""Raised whenever the same questions would be answered otherwise."""
MOST_OVER: Final = 2.0
"""How many times its length a context may have that its few lines need: short tables are rough."""


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


def make_exams(
    levels: Sequence[Level],
    lengths: Sequence[int],
    text: Text,
    filler: str,
    *,
    context_length: int,
    counts_positions: bool,
    num_problems: int,
    num_questions: int,
    seed: int,
) -> list[Exam]:
    """Recall and needles at every length; arithmetic at several positions, or after text of every length.

    Each level and length draws by itself.

    Args:
        levels: of these three.
        lengths: of contexts, tokens.
        text: the model's tokens.
        filler: text that needles are hidden in, and that stands before additions.
        context_length: that all of it must fit.
        counts_positions: whether the host begins a context at any position; else text stands before it.
        num_problems: contexts of each length or position.
        num_questions: after each context.
        seed: of everything drawn.

    Raises:
        CorpusError: a context that does not fit, or a length that the questions alone exceed by far.
    """
    exams = []
    for level in levels:
        free_standing = level == "arithmetic"
        for length in (*([0] if free_standing else []), *([] if free_standing and counts_positions else lengths)):
            rng = random.Random(f"{seed} {level} {length}")
            problems = tuple(_problem(level, rng, text, length, num_questions, filler) for _ in range(num_problems))
            least = min(text.count(problem.context) for problem in problems)
            if not free_standing and least > MOST_OVER * length:
                raise CorpusError(
                    f"{level} of {length} tokens takes {least} with {num_questions} questions after each context; give"
                    " longer --lengths, or fewer --questions"
                )
            room = context_length - max(map(text.longest, problems))
            if room < 0:
                raise CorpusError(
                    f"{level} of {length} tokens takes {-room} more than the context of {context_length}; give shorter"
                    " --lengths, or fewer --questions"
                )
            positions = {0, room // 2, room} if free_standing and counts_positions else {0}
            exams += [Exam(level, length or None, position, problems) for position in sorted(positions)]
    return exams


def _problem(level: Level, rng: random.Random, text: Text, length: int, num_questions: int, filler: str) -> Problem:
    if level == "recall":
        return recall(rng, text.count, length, num_questions)
    return (needles if level == "needle" else arithmetic)(rng, text.count, length, num_questions, filler)


class Respondent(Protocol):
    """A model behind one way to store its cache."""

    @property
    def name(self) -> str:
        """Of the way."""
        ...

    @property
    def key(self) -> str | None:
        """What decides its answers besides the questions and the model; None where nobody knows."""
        ...

    def answers(self, problem: Problem, *, offset: int = 0) -> tuple[str | None, ...]:
        """What is said after each question; None for an answer that did not come."""
        ...

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> str | None:
        """What is said after a prompt; None for an answer that did not come."""
        ...


class Metered(Protocol):
    """What counts how much of its prompts was found in a cache.

    Attributes:
        hits: of everything that it was asked, or that a journal says it was asked.
    """

    hits: HitCount


@dataclass(frozen=True, slots=True)
class Marked:
    """Marks, how many of the wrong answers never came, and how much of the questions' prompts was found in a cache."""

    marks: Marks
    failures: int
    hits: HitCount


class Examiner:
    """Marks answers; what was marked is journalled and not asked again.

    Args:
        folder: of the journal.
        identity: of whatever decides answers besides the questions and the way.
        meters: of respondents that count what they find in a cache, by name.
    """

    def __init__(self, folder: RunFolder, identity: str, meters: Mapping[str, Metered] | None = None) -> None:
        self._folder, self._identity, self._meters = folder, identity, meters or {}
        self._known = {
            record["key"]: record for record in folder.records(JOURNAL) if record.get("identity") == identity
        }

    def marks(self, exam: Exam, respondent: Respondent, on_problem: Callable[[], object] | None = None) -> Marked:
        """Of one way in one exam."""
        said, hits = [], HitCount()
        for problem in exam.problems:
            answers, found = self._answers(problem, exam, respondent)
            hits += found
            said.append([(q, answer) for q, answer in zip(problem.questions, answers, strict=True)])
            if on_problem is not None:
                on_problem()
        marks = Marks(tuple(tuple(a is not None and q.is_right(a) for q, a in answers) for answers in said))
        return Marked(marks, sum(answer is None for answers in said for _, answer in answers), hits)

    def _answers(self, problem: Problem, exam: Exam, respondent: Respondent) -> tuple[Sequence[str | None], HitCount]:
        asked = [problem.context, [[question.text, question.answer] for question in problem.questions]]
        key = None if respondent.key is None else sha256_of([ANSWERING, respondent.key, exam.position, asked])
        meter = self._meters.get(respondent.name)
        if record := self._known.get(key):
            hits = HitCount(*record.get("hits", ()))
            if meter is not None:
                meter.hits += hits
            return record["said"], hits
        before = HitCount() if meter is None else meter.hits
        answers = respondent.answers(problem, offset=exam.position)
        hits = HitCount() if meter is None else meter.hits - before
        if key is not None and None not in answers:  # what did not come may come another time
            about = {"level": exam.level, "tokens": exam.num_tokens, "position": exam.position, "way": respondent.name}
            found = {"said": list(answers), **({} if meter is None else {"hits": [hits.prompt, hits.cached]})}
            self._folder.append(JOURNAL, {"identity": self._identity, "key": key, **about, **found})
            self._known[key] = found
        return answers, hits


def accuracy_cell(
    exam: Exam, marked: Mapping[str, Marked], reference: str, *, seed: int, is_unread: bool = False
) -> Cell:
    """Accuracies of all ways in one exam, the profile's beside all others'; an answer that never came is wrong.

    Args:
        exam: what was asked.
        marked: by the name of the way.
        reference: name of the unquantized way, which may be none of them.
        seed: of the p-values.
        is_unread: whether contexts may have been read as they were before they were stored.
    """
    mine = marked[PROFILE].marks
    flag = marked[reference].marks.flag if reference in marked else None
    return Cell(
        level=exam.level,
        measure="accuracy",
        task=None,
        num_tokens=exam.num_tokens,
        position=exam.position,
        units=len(exam.problems),
        count=mine.num_questions,
        flag="unread" if is_unread else flag,
        results=tuple(
            Result(subject=name, **bounds(each.marks.interval()), failures=each.failures)
            for name, each in marked.items()
        ),
        differences=tuple(
            PairedDifference(
                other=other,
                **bounds(mine.minus(theirs.marks)),
                p_value=mine.sign_flip(theirs.marks, seed),
                mcnemar=mcnemar(mine, theirs.marks),
            )
            for other, theirs in marked.items()
            if other != PROFILE
        ),
    )
