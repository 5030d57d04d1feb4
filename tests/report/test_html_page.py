"""Whatever a page is given comes out as text: no template lets markup in, and none names what is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from page_reader import Page

from kvtuner.report.html_page import environment, render, whole_options
from kvtuner.report.plots.drawing import Drawing, drawn
from kvtuner.report.table import Table


def page_of(text: str) -> str:
    page = environment().from_string(
        '{% extends "base.html" %}{% from "parts.html" import drawn_figure, table %}'
        "{% block body %}<p>{{ text }}</p>{{ drawn_figure(drawn) }}{{ table(rows) }}{% endblock %}"
    )
    both = drawn(lambda width: Drawing(width, text))
    return page.render(title=text, text=text, drawn=both, rows=Table((text, "x"), [(text, text)]))


# The parser turns NUL into U+FFFD and line ends into one kind, as HTML asks; neither is about escaping.
outside_text = st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), min_size=1)


@given(outside_text)
def test_a_parser_reads_back_the_very_text_and_attribute_and_no_other_tag(text: str) -> None:
    page = Page(page_of(text))
    assert page.names() == Page(page_of("plain")).names()
    assert [attributes["aria-label"] for name, attributes in page.tags if name == "svg"] == [text] * 2
    assert page.cells == [text, "x", text, text]


@given(outside_text)
def test_text_with_whole_options_reads_as_it_did(text: str) -> None:
    page = Page(f"<p>{whole_options(text + ' --gpu H100')}</p>")
    assert page.text == text + " --gpu H100"


def test_browsers_cannot_break_an_option_behind_its_hyphens() -> None:
    found = whole_options("run kvtuner report --gpu-memory <NAME>, a well-kept one --")
    assert found == 'run kvtuner report <span class="option">--gpu-memory</span> &lt;NAME&gt;, a well-kept one --'


def test_no_page_has_the_marks_of_markdown() -> None:
    pages = [name for name in environment().list_templates() if "markdown" not in name]
    sources = [Path(str(environment().get_template(name).filename)).read_text(encoding="utf-8") for name in pages]
    assert len(sources) > 8
    assert [line for text in sources for line in re.sub("{#.*?#}", "", text).splitlines() if "`" in line] == []


def test_a_table_without_rows_says_that_nothing_was_measured() -> None:
    page = environment().from_string('{% from "parts.html" import table %}{{ table(rows) }}')
    assert "Not measured in this run." in page.render(rows=Table(("x",), []))


def test_a_template_that_names_what_it_was_not_given_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="articles"):
        render("profile.html", title="t")
