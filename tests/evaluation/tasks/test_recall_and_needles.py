"""Questions have one right answer, which stands where it should, in contexts as long as asked."""

from __future__ import annotations

import itertools
import random
import re
from typing import TYPE_CHECKING

import pytest

from kvtuner.calibration.demo.tasks import recall_problem
from kvtuner.calibration.model_loading import ModelSource, load_tokenizer
from kvtuner.evaluation.backends.base import TextTokenizer
from kvtuner.evaluation.tasks.recall_and_needles import NUM_EXAMPLES, Problem, Question, arithmetic, needles, recall

if TYPE_CHECKING:
    from collections.abc import Callable

FILLER = "".join(f"Line {number} of a text that says nothing, if: or: anything.\n" for number in range(40))


def count(text: str) -> int:
    """A tokenizer: longer words and numbers are more tokens."""
    return len(re.findall(r"\w{1,2}|\W", text))


def bounded(count_tokens: Callable[[str], int]) -> Callable[[str], int]:
    """A function that counts as the other one, for a search that ends soon."""
    calls = itertools.count()

    def counted(text: str) -> int:
        assert next(calls) < 100, "still looking"
        return count_tokens(text)

    return counted


def answers_of(problem: Problem) -> list[tuple[str, list[str]]]:
    """Each question with everything that its context says of it."""
    return [
        (question.answer, re.findall(rf"(?m)^{re.escape(question.text)}(\d+)$", problem.context))
        for question in problem.questions
    ]


@pytest.mark.parametrize("num_tokens", [60, 256, 1000, 20_000])
def test_a_key_stands_once_in_a_table_of_the_length(num_tokens: int) -> None:
    problem = recall(random.Random(num_tokens), count, num_tokens, 5)
    assert abs(count(problem.context) - num_tokens) < 0.03 * num_tokens + 8
    table, _, examples = problem.context.partition("?\n")
    assert len(set(table.splitlines())) == len(table.splitlines()) == len({line[:-4] for line in table.splitlines()})
    assert all(line in table.splitlines() for line in examples.splitlines())
    assert len(examples.splitlines()) == NUM_EXAMPLES
    assert all(found == [answer] for answer, found in answers_of(problem))
    assert len({question.text for question in problem.questions}) == 5


LONGEST_OF_TWO_LETTERS = 26**2 // 2
"""Lines of a table: a longer one has keys of three letters."""


@pytest.mark.parametrize(
    ("make_count", "lengths"),
    [
        pytest.param(
            lambda: TextTokenizer(load_tokenizer(ModelSource("demo"))).count,
            range(2300, 2700, 50),
            marks=pytest.mark.slow,
        ),
        (lambda: len, range(2300, 3200, 50)),
        (lambda: lambda text: len(re.findall(r"\d|[a-z]{1,2}|\W", text)), range(1900, 2560, 20)),
        (lambda: count, range(1600, 2900, 50)),
    ],
    ids=["demo", "characters", "digits", "pairs of characters"],
)
def test_a_table_is_found_where_longer_keys_ask_for_fewer_lines(
    make_count: Callable[[], Callable[[str], int]], lengths: range
) -> None:
    counted, lines = make_count(), set()
    for num_tokens in lengths:
        problem = recall(random.Random(num_tokens), bounded(counted), num_tokens, 4)
        table = problem.context.partition("?\n")[0].splitlines()
        lines.add(len(table))
        assert counted(problem.context) < 1.03 * num_tokens + 8
        if counted(problem.context) < 0.97 * num_tokens - 8:
            assert len(table) == LONGEST_OF_TWO_LETTERS, "the longest there is before keys get longer"
            longer = recall_problem(random.Random(num_tokens), len(table) + 1, 1).prompt
            assert counted(longer) > 0.97 * num_tokens - 40
        assert all(found == [answer] for answer, found in answers_of(problem))
    assert min(lines) < LONGEST_OF_TWO_LETTERS < max(lines), "both sides of where keys get longer"


@pytest.mark.parametrize("num_tokens", [120, 1000, 5000])
def test_needles_lie_once_at_all_depths(num_tokens: int) -> None:
    problem = needles(random.Random(num_tokens), count, num_tokens, 4, FILLER)
    assert abs(count(problem.context) - num_tokens) < 50
    assert all(found == [answer] for answer, found in answers_of(problem))
    depths = [problem.context.index(question.text + question.answer) for question in problem.questions]
    assert depths == sorted(depths)
    for number, depth in enumerate(depths if num_tokens > 1000 else []):
        assert depth / len(problem.context) == pytest.approx((2 * number + 1) / 8, abs=0.05)


@pytest.mark.parametrize("filler", ["", "word " * 5000, "\u6587" * 9000])
def test_text_without_lines_is_cut(filler: str) -> None:
    problem = needles(random.Random(0), count, 700, 4, filler)
    assert abs(count(problem.context) - 700) < 60
    assert all(found == [answer] for answer, found in answers_of(problem))


def test_sums_are_right_and_not_those_of_the_examples() -> None:
    problem = arithmetic(random.Random(0), count, 0, 50, FILLER)
    for question in problem.questions:
        assert question.text not in problem.context
        left, right = question.text.rstrip("=").split("+")
        assert int(left) + int(right) == int(question.answer)


def test_sums_stand_after_other_text_of_the_length() -> None:
    alone, after = (arithmetic(random.Random(0), count, length, 5, FILLER) for length in (0, 900))
    assert after.context.endswith(alone.context)
    assert after.questions == alone.questions
    assert abs(count(after.context) - 900) < 30


def test_the_same_seed_asks_the_same() -> None:
    for make in (lambda rng: recall(rng, count, 200, 3), lambda rng: needles(rng, count, 200, 3, FILLER)):
        assert make(random.Random(4)) == make(random.Random(4)) != make(random.Random(5))


@pytest.mark.parametrize(
    ("continuation", "is_answered"),
    [("38", False), ("384", False), ("384\n", True), (" 38,", True), ("", False), ("ab", False)],
)
def test_more_is_not_asked_for_once_a_number_has_ended(continuation: str, is_answered: bool) -> None:
    question = Question("ab:", "384")
    assert question.is_answered(continuation) == is_answered
    assert question.max_tokens > len(question.answer)


@pytest.mark.parametrize(
    ("continuation", "is_right"),
    [("384", True), (" 384\nzz:1", True), ("384.", True), ("3841", False), ("38", False), ("", False), ("x384", False)],
)
def test_an_answer_is_the_whole_number_that_comes_first(continuation: str, is_right: bool) -> None:
    assert Question("ab:", "384").is_right(continuation) == is_right
