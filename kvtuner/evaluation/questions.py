"""Questions with one right answer, in contexts of a wanted length: recall, needles in text, addition.

One format for all models: lines that a model continues, ``key:value`` and ``12+7=19``, with examples. Knows nothing of
models but how many tokens a text has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.calibration.demo.tasks import addition_lines, recall_problem

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    CountTokens = Callable[[str], int]

NUM_EXAMPLES: Final = 3
_NUMBER: Final = re.compile(r"\s*(\d+)")


@dataclass(frozen=True, slots=True)
class Question:
    """What follows the context, and the number that should follow that."""

    text: str
    answer: str

    def is_right(self, continuation: str) -> bool:
        """Whether a continuation begins with the answer, and the number ends there."""
        found = _NUMBER.match(continuation)
        return found is not None and found[1] == self.answer


@dataclass(frozen=True, slots=True)
class Problem:
    """A context and the questions asked after it, each by itself."""

    context: str
    questions: tuple[Question, ...]


def recall(rng: random.Random, count_tokens: CountTokens, num_tokens: int, num_questions: int) -> Problem:
    """A table of keys and values that fills the context, and keys to look up.

    Args:
        rng: draws.
        count_tokens: of a text.
        num_tokens: of the context, about; at least a few lines are made.
        num_questions: asked, of different lines while there are any.
    """
    sample = recall_problem(rng, 64, NUM_EXAMPLES)
    per_line = (count_tokens(sample.prompt) - count_tokens("?\n")) / 64
    num_pairs = max(round(num_tokens / per_line) - NUM_EXAMPLES, 2 * NUM_EXAMPLES)
    drawn = recall_problem(rng, num_pairs, NUM_EXAMPLES + num_questions)
    lines = [drawn.table[index] for index in drawn.questions]
    examples = "".join(f"{key}:{value}\n" for key, value in lines[:NUM_EXAMPLES])
    return Problem(drawn.prompt + examples, tuple(Question(f"{key}:", value) for key, value in lines[NUM_EXAMPLES:]))


def needles(rng: random.Random, count_tokens: CountTokens, num_tokens: int, num_questions: int, filler: str) -> Problem:
    """Lines of a key and a value, each at a depth of its own in other text, and the keys to look up.

    Args:
        rng: draws.
        count_tokens: of a text.
        num_tokens: of the context, about.
        num_questions: needles, the first at the beginning, the last near the end.
        filler: text to hide them in, repeated where it is too short.
    """
    wanted = num_questions + NUM_EXAMPLES
    drawn = recall_problem(rng, 16 * wanted, 1).table
    # Keys that the filler does not have, as far as there are: a needle is one line.
    drawn = tuple(sorted(drawn, key=lambda line: f"{line[0]}:" in filler))[:wanted]
    hidden, shown = drawn[:num_questions], drawn[num_questions:]
    examples = "".join(f"{key}:{value}\n" for key, value in shown)
    room = num_tokens - 2 * count_tokens(examples) - count_tokens("".join(f"{k}:{v}\n" for k, v in hidden))
    lines = filler.splitlines(keepends=True) or ["\n"]
    start, have = rng.randrange(len(lines)), 0
    text: list[str] = []
    while have < room:
        line = lines[(start + len(text)) % len(lines)]
        text.append(line if line.endswith("\n") else line + "\n")
        have += max(count_tokens(line), 1)
    for number, (key, value) in reversed(list(enumerate(hidden))):
        text.insert(number * len(text) // num_questions, f"{key}:{value}\n")
    context = examples + "".join(text) + "?\n" + examples
    return Problem(context, tuple(Question(f"{key}:", value) for key, value in hidden))


def arithmetic(rng: random.Random, num_questions: int) -> Problem:
    """Additions of numbers of one to three digits, after a few that are done."""
    lines = addition_lines(rng, 8 + num_questions).splitlines(keepends=True)
    asked = [line.strip().partition("=") for line in lines[8:]]
    return Problem("".join(lines[:8]), tuple(Question(f"{left}=", total) for left, _, total in asked))
