from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtuner.report.table import Table, markdown_text

if TYPE_CHECKING:
    from fixture_types import RunCommand


def test_numbers_stand_to_the_right_and_names_to_the_left() -> None:
    table = Table(("", "bits", "note"), [("bf16", "16", "a"), ("K4V4", "4.5", "longer")], left=(0, 2))
    assert table.lines() == ["      bits  note", "bf16    16  a", "K4V4   4.5  longer"]


def test_a_table_without_headers_has_rows_alone() -> None:
    assert Table(("", ""), [("seed", "7"), ("k", "12")]).lines() == ["seed   7", "k     12"]
    assert Table(("", ""), []).lines() == []


def test_columns_that_do_not_fit_stand_below_beside_the_first_again() -> None:
    table = Table(("", "bits", "tokens"), [("bf16", "16", "9,000"), ("K4V4", "4.5", "32,000")])
    whole = ["      bits  tokens", "bf16    16   9,000", "K4V4   4.5  32,000"]
    assert table.lines(18) == whole
    assert table.lines(17) == [
        "      bits", "bf16    16", "K4V4   4.5", "", "      tokens", "bf16   9,000", "K4V4  32,000",
    ]  # fmt: skip


def test_the_text_of_facts_is_wrapped_and_its_longest_word_moves_to_the_left() -> None:
    table = Table.of_facts([("made by", "a long text of words"), ("digest", "0123456789abcdef"), ("none", "")])
    assert table.lines(20) == [
        "made by  a long text", "         of words", "digest", "    0123456789abcdef", "none",
    ]  # fmt: skip


def test_rows_without_headers_go_on_in_the_next_line_all_alike() -> None:
    table = Table(("", "", ""), [("layer 0", "K4V4", "K8V8"), ("layer 12", "K2V2", "K4V4 b")], left=(0, 1, 2))
    assert table.lines(18) == ["layer 0   K4V4", "    K8V8", "layer 12  K2V2", "    K4V4 b"]


@pytest.mark.parametrize(
    "words",
    [
        ("show", "catalogue:demo-4bit"),
        ("validate", "catalogue:demo-4bit"),
        ("validate", "catalogue:demo-outliers-4bit", "--model", "demo"),
        ("diff", "catalogue:demo-3bit", "catalogue:demo-outliers-6bit"),
        ("list",),
    ],
    ids=" ".join,
)
def test_no_line_of_a_command_is_wider_than_the_terminal(
    words: tuple[str, ...], run: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(*words)
    assert len(out.splitlines()) > 1 and [line for line in out.splitlines() if len(line) > 80] == []


def test_markdown_has_a_rule_under_its_headers_and_a_cell_for_each_header() -> None:
    assert Table(("", "KL"), [("fp8", "0.1 [0, 1]")]).markdown() == [
        "|  | KL |",
        "| --- | --- |",
        "| fp8 | 0.1 \\[0, 1\\] |",
    ]


def test_text_in_markdown_is_one_line_of_plain_text() -> None:
    assert markdown_text("a|b\n*c* <script>  `d`") == "a\\|b \\*c\\* \\<script\\> \\`d\\`"
