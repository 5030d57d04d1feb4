"""Whatever a page is given comes out as text: no template lets markup in, and none names what is not there."""

from __future__ import annotations

import base64
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from kvtuner.report.html_page import environment, render

PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")


class Recorder(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.in_cell = False
        self.alt = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.in_cell = tag == "td"
        self.cells += [""] * self.in_cell
        self.alt = dict(attrs).get("alt") or self.alt

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = False

    def handle_data(self, data: str) -> None:
        if self.in_cell:
            self.cells[-1] += data


def page_of(text: str) -> str:
    page = environment().from_string(
        '{% extends "base.html" %}{% from "parts.html" import figure, table %}'
        "{% block body %}<p>{{ text }}</p>{{ figure(png, text) }}{{ table((text, 'x'), [(text, text)]) }}{% endblock %}"
    )
    return page.render(title=text, text=text, png=PIXEL)


# The parser turns NUL into U+FFFD and line ends into one kind, as HTML asks; neither is about escaping.
outside_text = st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), min_size=1)


@given(outside_text)
def test_a_parser_reads_back_the_very_text_and_attribute_and_no_other_tag(text: str) -> None:
    page = Recorder(page_of(text))
    assert page.tags == Recorder(page_of("plain")).tags
    assert page.alt == text
    assert page.cells == [text, text]


def test_a_table_without_rows_says_that_nothing_was_measured() -> None:
    page = environment().from_string('{% from "parts.html" import table %}{{ table(("x",), []) }}')
    assert "Not measured in this run." in page.render()


def test_a_template_that_names_what_it_was_not_given_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="articles"):
        render("profile.html", title="t")
