"""Text of the demo model's two generated tasks: key-value recall and addition.

Knows nothing of models; the training script, the demo corpus and the recall benchmark all draw from here, so that they
speak the same format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VALUE_DIGITS = 3


@dataclass(frozen=True, slots=True)
class RecallProblem:
    """A table of ``key:value`` lines, and the questions asked about it."""

    table: tuple[tuple[str, str], ...]
    questions: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """The table and the line that opens the questions."""
        return "".join(f"{key}:{value}\n" for key, value in self.table) + "?\n"

    @property
    def answered(self) -> str:
        """The whole document: the table, then every question with its answer."""
        lines = (self.table[index] for index in self.questions)
        return self.prompt + "".join(f"{key}:{value}\n" for key, value in lines)


def recall_problem(rng: random.Random, num_pairs: int, num_questions: int) -> RecallProblem:
    """Draw a table of `num_pairs` distinct keys, of two letters or as many as it takes, with three-digit values."""
    key_letters = 2
    while len(LETTERS) ** key_letters < 2 * num_pairs:
        key_letters += 1
    drawn: dict[str, None] = {}
    while len(drawn) < num_pairs:
        drawn.setdefault("".join(rng.choice(LETTERS) for _ in range(key_letters)))
    keys = list(drawn)
    values = ["".join(rng.choice("0123456789") for _ in range(VALUE_DIGITS)) for _ in keys]
    questions: list[int] = []
    while len(questions) < num_questions:
        questions.extend(rng.sample(range(num_pairs), num_pairs))
    return RecallProblem(tuple(zip(keys, values, strict=True)), tuple(questions[:num_questions]))


def addition_lines(rng: random.Random, num_lines: int) -> str:
    """Lines such as ``47+385=432``."""
    lines = []
    for _ in range(num_lines):
        left, right = rng.randrange(10 ** rng.randint(1, 3)), rng.randrange(10 ** rng.randint(1, 3))
        lines.append(f"{left}+{right}={left + right}\n")
    return "".join(lines)
