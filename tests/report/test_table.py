from __future__ import annotations

from kvtuner.report.table import Table, markdown_text


def test_numbers_stand_to_the_right_and_names_to_the_left() -> None:
    table = Table(("", "bits", "note"), [("bf16", "16", "a"), ("K4V4", "4.5", "longer")], left=(0, 2))
    assert table.lines() == ["      bits  note", "bf16    16  a", "K4V4   4.5  longer"]


def test_a_table_without_headers_has_rows_alone() -> None:
    assert Table(("", ""), [("seed", "7"), ("k", "12")]).lines() == ["seed   7", "k     12"]
    assert Table(("", ""), []).lines() == []


def test_markdown_has_a_rule_under_its_headers_and_a_cell_for_each_header() -> None:
    assert Table(("", "KL"), [("fp8", "0.1 [0, 1]")]).markdown() == [
        "|  | KL |",
        "| --- | --- |",
        "| fp8 | 0.1 \\[0, 1\\] |",
    ]


def test_text_in_markdown_is_one_line_of_plain_text() -> None:
    assert markdown_text("a|b\n*c* <script>  `d`") == "a\\|b \\*c\\* \\<script\\> \\`d\\`"
