from __future__ import annotations

import math

import pytest

from kvtuner.evaluation.statistics import Interval
from kvtuner.report.formatting import fixed, interval, number, percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (4.7, "4.70"),
        (0.0049, "0.00490"),
        (0.001, "0.00100"),
        (0.00099, "9.90e-4"),
        (-4.84e-3, "-0.00484"),
        (1.234e-12, "1.23e-12"),
        (123.0, "123"),
        (123456.0, "123456"),
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_numbers_keep_three_digits_and_never_turn_into_zero(value: float | None, text: str) -> None:
    assert number(value) == text


def test_what_was_not_measured_is_a_dash_everywhere() -> None:
    assert [interval(None), fixed(None), percent(None), fixed(math.nan), percent(math.inf)] == ["-"] * 5


def test_intervals_shares_and_decimals_read_as_in_the_tables() -> None:
    assert interval(Interval(0.02, 0.01, 0.03)) == "0.0200 [0.0100, 0.0300]"
    assert percent(0.98765) == "98.8%"
    assert fixed(1234.5678, 1) == "1,234.6"
    assert fixed(4.2e17) == "4.20e+17"
