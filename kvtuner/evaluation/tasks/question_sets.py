"""Sets of questions for every scheme: drawn, asked, marked and journalled."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from kvtuner.errors import CorpusError
from kvtuner.evaluation.backends.base import AnswerJournal, Backend, HitCount, TextTokenizer, unread_flag
from kvtuner.evaluation.cells import BinaryScores, CellKey, make_cell
from kvtuner.evaluation.tasks.recall_and_needles import Problem, arithmetic, needles, recall
from kvtuner.exported_configs.scheme_names import REFERENCE
from kvtuner.progress.bar import ProgressBar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtuner.exported_configs.profile.evaluation_record import Cell, Level
    from kvtuner.run_folder import RunFolder

JOURNAL: Final = "answers.jsonl"
ANSWERING: Final = 1
"""The version of the answers; increase it when the same questions would be answered otherwise."""
QUESTION_LEVELS: Final = ("recall", "needle", "arithmetic")
MOST_OVER: Final = 2.0
"""The factor by which a context may exceed its length where its few lines need it: short tables are rough."""


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Problems of one kind, of one length, at one place.

    The problems are the same for every scheme; their contexts have about as many tokens as the place says.
    """

    key: CellKey
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """The settings of the draw of question sets: so many problems of each length of contexts, tokens, or position.

    Needles are hidden in the filler, which also stands before additions, unless a backend counts positions: that is,
    unless it begins a context at any position.
    """

    lengths: Sequence[int]
    filler: str
    context_length: int
    counts_positions: bool
    num_problems: int
    num_questions: int
    seed: int


def draw_question_sets(levels: Sequence[Level], text: TextTokenizer, options: DrawOptions) -> list[QuestionSet]:
    """Recall and needles at every length; arithmetic at several positions, or after text of every length.

    Each level and length draws by itself; `CorpusError` where a context does not fit, or questions alone exceed it.
    """
    sets = []
    for level in levels:
        at_positions = level == "arithmetic" and options.counts_positions
        lengths = [] if at_positions else [*options.lengths]
        if level == "arithmetic":
            lengths.insert(0, 0)  # additions after no other text
        for length in lengths:
            problems, room = _draw_problems(level, length, text, options)
            positions = {0, room // 2, room} if at_positions else {0}
            sets += [QuestionSet(CellKey(level, length or None, position), problems) for position in sorted(positions)]
    return sets


def _draw_problems(
    level: Level, length: int, text: TextTokenizer, options: DrawOptions
) -> tuple[tuple[Problem, ...], int]:
    """The problems of a level and a length, and how many tokens of the context they leave."""
    rng = random.Random(f"{options.seed} {level} {length}")
    if level == "recall":
        draw = partial(recall, rng, text.count, length, options.num_questions)
    else:
        make = needles if level == "needle" else arithmetic
        draw = partial(make, rng, text.count, length, options.num_questions, options.filler)
    problems = tuple(draw() for _ in range(options.num_problems))
    least = min(text.count(problem.context) for problem in problems)
    if level != "arithmetic" and least > MOST_OVER * length:
        raise CorpusError(
            f"{level} of {length} tokens takes {least} with {options.num_questions} questions after each context; give"
            " longer --lengths, or fewer --questions"
        )
    room = options.context_length - max(_most_tokens(problem, text) for problem in problems)
    if room < 0:
        raise CorpusError(
            f"{level} of {length} tokens takes {-room} more than the context of {options.context_length}; give shorter"
            " --lengths, or fewer --questions"
        )
    return problems, room


def _most_tokens(problem: Problem, text: TextTokenizer) -> int:
    """The tokens of a context with its longest question and as much of an answer as is asked for."""
    questions = (text.count(question.text) + question.max_tokens for question in problem.questions)
    return len(text.context(problem.context)) + max(questions)


def question_cells(
    sets: Sequence[QuestionSet],
    backends: Sequence[Backend],
    folder: RunFolder,
    identity: str,
    *,
    asks_all: bool,
    seed: int,
) -> list[Cell]:
    """The accuracy of every backend, the profile's among them, in every question set; answers are journalled.

    The unquantized model is asked first. A set whose answers all came and are at the floor is skipped by all other
    backends, unless everything is to be asked. The identity is the hash of whatever decides answers besides the
    questions and the backend.
    """
    in_turn = sorted(backends, key=lambda backend: backend.name != REFERENCE)
    journal = AnswerJournal(folder, JOURNAL, identity, version=ANSWERING)
    cells = []
    total = sum(len(questions.problems) for questions in sets) * len(backends)
    with ProgressBar(desc="questions", total=total, unit="problem") as bar:
        for questions in sets:
            marks: dict[str, BinaryScores] = {}
            failures: dict[str, int] = {}
            hits: dict[str, HitCount] = {}
            skipped: tuple[str, ...] = ()
            for backend in in_turn:
                is_answered = REFERENCE in marks and not failures[REFERENCE]
                if not asks_all and is_answered and marks[REFERENCE].flag == "floor":
                    skipped = tuple(other.name for other in backends if other.name not in marks)
                    bar.total -= len(skipped) * len(questions.problems)
                    break
                answers, hits[backend.name] = _ask(questions, backend, journal, bar.update)
                pairs = zip(questions.problems, answers, strict=True)
                marks[backend.name] = BinaryScores(tuple(problem.marks(texts) for problem, texts in pairs))
                failures[backend.name] = sum(texts.count(None) for texts in answers)
            asked = [backend for backend in backends if backend.name in marks]
            key = replace(questions.key, flag=unread_flag(asked, hits), failures=failures, skipped=skipped)
            cells.append(make_cell("accuracy", key, marks, seed))
    return cells


def _ask(
    questions: QuestionSet, backend: Backend, journal: AnswerJournal, on_problem: Callable[[], object]
) -> tuple[list[list[str | None]], HitCount]:
    answers, hits, key = [], HitCount(), questions.key
    asked = []
    for problem in questions.problems:
        wanted = [[question.text, question.answer] for question in problem.questions]
        asked.append(([key.position, [problem.context, wanted]], (problem, key.position)))
    for question, (problem, _) in journal.prepared(backend, "answers", asked):
        texts, more_hits = journal.ask(
            backend,
            question,
            partial(backend.answers, problem, offset=key.position),
            level=key.level,
            tokens=key.num_tokens,
            position=key.position,
            scheme=backend.name,
        )
        answers.append(texts)
        hits += more_hits
        on_problem()
    return answers, hits
