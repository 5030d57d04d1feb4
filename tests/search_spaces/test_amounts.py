"""Bytes and tokens, which budgets and flags read alike."""

from __future__ import annotations

import pytest

from kvtuner.errors import BudgetError, OptionError
from kvtuner.pipeline.flags.number_readers import byte_count, token_count
from kvtuner.search_spaces.amounts import amount_of_bytes, amount_of_tokens
from kvtuner.search_spaces.budget import Budget

BYTES = {"80GiB": 80 << 30, "80gib": 80 << 30, "1.5 MiB": 3 << 19, "40GB": 40_000_000_000, "2tib": 2 << 40, "7B": 7}
TOKENS = {"32k": 32_768, "1K": 1024, "32768": 32_768, "1": 1}


@pytest.mark.parametrize(("text", "value"), BYTES.items())
def test_bytes_of_a_flag_are_those_of_a_budget(text: str, value: int) -> None:
    assert byte_count(text) == value
    budget = Budget.parse(f"{text}@1x1")
    assert budget.amount * budget.unit_bytes == value


@pytest.mark.parametrize(("text", "value"), TOKENS.items())
def test_tokens_of_a_flag_are_those_of_a_budget(text: str, value: int) -> None:
    assert token_count(text) == value
    assert Budget.parse(f"1GiB@1x{text}").request_tokens == value


def test_bytes_without_a_unit_are_bytes_of_flags_alone() -> None:
    assert byte_count(" 1000 ") == 1000
    with pytest.raises(BudgetError):
        Budget.parse("1000@1x1")


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e3", "40 PiB", "0x10", "9" * 30, "१GiB"])
def test_other_bytes_are_refused_by_both(text: str) -> None:
    assert amount_of_bytes(text) is None
    with pytest.raises(OptionError, match="bytes are written 512MiB or 40GiB"):
        byte_count(text)
    with pytest.raises(BudgetError):
        Budget.parse(f"{text}@1x1")


@pytest.mark.parametrize("text", ["-1", "32kb", "3.5k", "", "k", "9" * 30, "१"])
def test_other_tokens_are_refused_by_both(text: str) -> None:
    assert amount_of_tokens(text) is None
    with pytest.raises(OptionError, match="must be a whole number of tokens, such as 32768 or 32k, not"):
        token_count(text)
    with pytest.raises(BudgetError):
        Budget.parse(f"1GiB@1x{text}")


@pytest.mark.parametrize("text", ["0", "0k"])
def test_no_tokens_are_refused_by_both(text: str) -> None:
    with pytest.raises(OptionError, match="must be at least 1, not 0"):
        token_count(text)
    with pytest.raises(BudgetError, match="more than nothing"):
        Budget.parse(f"1GiB@1x{text}")
