"""Questions with one right answer, in contexts of a wanted length: recall, needles in text, addition.

One format for all models: lines that a model continues, ``key:value`` and ``12+7=19``, with examples. A problem is
drawn with a source of draws, a function that counts the tokens of a text, the tokens of the context, about, the number
of questions, and other text, which is repeated where it is too short. Knows nothing else of models.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.calibration.demo.tasks import addition_lines, recall_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    CountTokens = Callable[[str], int]

NUM_EXAMPLES: Final = 3
NUM_SUMS: Final = 8
PIECE: Final = 80
"""The characters of a line that other text is cut into."""
_NUMBER: Final = re.compile(r"\s*(\d+)(.?)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Question:
    """A text that follows the context, and the number that should follow that."""

    text: str
    answer: str

    @property
    def max_tokens(self) -> int:
        """The tokens after which an answer is known to be right or not: one for each character, a space, an end."""
        return len(self.answer) + 2

    def is_right(self, continuation: str) -> bool:
        """Whether a continuation begins with the answer, and the number ends there."""
        number = _NUMBER.match(continuation)
        return number is not None and number[1] == self.answer

    def is_answered(self, continuation: str) -> bool:
        """Whether more would not change that: a number has ended."""
        number = _NUMBER.match(continuation)
        return number is not None and number[2] != ""


@dataclass(frozen=True, slots=True)
class Problem:
    """A context and the questions asked after it, each by itself."""

    context: str
    questions: tuple[Question, ...]

    def marks(self, answers: Sequence[str | None]) -> tuple[bool, ...]:
        """Whether each answer is right; one that never came is not."""
        pairs = zip(self.questions, answers, strict=True)
        return tuple(text is not None and question.is_right(text) for question, text in pairs)


def recall(rng: random.Random, count_tokens: CountTokens, num_tokens: int, num_questions: int) -> Problem:
    """A table of keys and values that fills the context, and keys of different lines, as far as there are, to look up.

    The table has a few lines at least, and no more than fit where one line more would make all keys longer.
    """
    seed, num_pairs, least = rng.random(), 64, NUM_EXAMPLES + num_questions
    tried: list[int] = []
    while num_pairs not in tried:  # keys get longer where there are many
        tried.append(num_pairs)
        problem, examples = _table(seed, num_pairs, num_questions)
        fixed = count_tokens("?\n" + examples)
        per_line = (count_tokens(problem.context) - fixed) / num_pairs
        wanted = max(round((num_tokens - fixed) / per_line), least)
        if abs(wanted - num_pairs) <= max(1, num_pairs // 50):
            return problem
        num_pairs = wanted
    # Longer keys ask for fewer lines, which have shorter keys and ask for more: the longest table that is not too long.
    turns = tried[tried.index(num_pairs) :]
    fits, exceeds = min(turns), max(turns)
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        is_short = count_tokens(_table(seed, middle, num_questions)[0].context) <= num_tokens
        fits, exceeds = (middle, exceeds) if is_short else (fits, middle)
    return _table(seed, fits, num_questions)[0]


def needles(rng: random.Random, count_tokens: CountTokens, num_tokens: int, num_questions: int, filler: str) -> Problem:
    """Lines of a key and a value, each in the middle of an equal part of other text, and the keys to look up."""
    wanted = num_questions + NUM_EXAMPLES
    drawn = recall_problem(rng, 16 * wanted, 1).table
    # Keys that the filler does not have, as far as there are: a needle is one line.
    drawn = tuple(sorted(drawn, key=lambda line: f"{line[0]}:" in filler))[:wanted]
    hidden, shown = drawn[:num_questions], drawn[num_questions:]
    examples = "".join(f"{key}:{value}\n" for key, value in shown)
    room = num_tokens - 2 * count_tokens(examples) - count_tokens("".join(f"{k}:{v}\n" for k, v in hidden))
    text = _lines(rng, count_tokens, room, filler)
    for number, (key, value) in reversed(list(enumerate(hidden))):
        text.insert((2 * number + 1) * len(text) // (2 * num_questions), f"{key}:{value}\n")
    context = examples + "".join(text) + "?\n" + examples
    return Problem(context, tuple(Question(f"{key}:", value) for key, value in hidden))


def arithmetic(
    rng: random.Random, count_tokens: CountTokens, num_tokens: int, num_questions: int, filler: str
) -> Problem:
    """Additions of numbers of one to three digits, after a few that are done, after other text where there is room."""
    lines = addition_lines(rng, NUM_SUMS + num_questions).splitlines(keepends=True)
    examples = "".join(lines[:NUM_SUMS])
    asked = [line.strip().partition("=") for line in lines[NUM_SUMS:]]
    before = "".join(_lines(rng, count_tokens, num_tokens - count_tokens(examples), filler))
    return Problem(before + examples, tuple(Question(f"{left}=", total) for left, _, total in asked))


def _table(seed: float, num_pairs: int, num_questions: int) -> tuple[Problem, str]:
    """A table of so many lines with questions about it, and the examples that its context ends with."""
    drawn = recall_problem(random.Random(seed), num_pairs, NUM_EXAMPLES + num_questions)
    lines = [drawn.table[index] for index in drawn.questions]
    examples = "".join(f"{key}:{value}\n" for key, value in lines[:NUM_EXAMPLES])
    asked = tuple(Question(f"{key}:", value) for key, value in lines[NUM_EXAMPLES:])
    return Problem(drawn.prompt + examples, asked), examples


def _lines(rng: random.Random, count_tokens: CountTokens, num_tokens: int, filler: str) -> list[str]:
    """Lines of a text from anywhere in it on, about so many tokens."""
    lines = [line[first : first + PIECE] for line in filler.splitlines() for first in range(0, len(line), PIECE)]
    lines = lines or [""]
    start, have = rng.randrange(len(lines)), 0
    text: list[str] = []
    while have < num_tokens:
        text.append(lines[(start + len(text)) % len(lines)] + "\n")
        have += max(count_tokens(text[-1]), 1)
    return text
