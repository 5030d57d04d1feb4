"""A page that needs nothing else: head, sections, tables and pictures. Knows nothing of their content."""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING, Final

from kvtuner.report.markup import Markup, element, join
from kvtuner.report.report_style import PAGE_STYLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# No script, font or picture from anywhere: a browser refuses even what an escaping fault would let through.
_POLICY: Final = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_CSS_PIXELS_PER_PIXEL: Final = 0.625  # pictures have 160 dots per inch; 100 CSS pixels are an inch here


def page(title: str, *sections: Markup, style: str = "") -> str:
    """The whole of it; `style` adds to the common one."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", title),
        element("style", PAGE_STYLE, style),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', *sections), lang='en')}\n"


def section(title: str, explanation: str, *parts: Markup) -> Markup:
    """One of them."""
    return element("section", element("h2", title), element("p", explanation), *parts)


def absent() -> Markup:
    """In place of what was not measured."""
    return element("p", "Not measured in this run.", class_="soft")


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, marked: int | None = None, wrap: bool = False
) -> Markup:
    """A table that scrolls by itself where it is wider than the page.

    Args:
        headers: of columns; none where all are empty.
        rows: of cells.
        marked: the row that stands out.
        wrap: whether cells may take several lines.
    """
    wrapping = {"class_": "wrap"} if wrap else {}
    body = [
        element("tr", *(element("td", cell, **wrapping) for cell in row), **_marking(index == marked))
        for index, row in enumerate(rows)
    ]
    if not body:
        return absent()
    head = element("tr", *(element("th", text) for text in headers)) if any(headers) else join()
    return element("div", element("table", head, *body), class_="scroll")


def _marking(is_marked: bool) -> dict[str, str]:
    return {"class_": "winner"} if is_marked else {}


def figure(png: bytes, description: str) -> Markup:
    """A picture, with words for those who cannot see it."""
    width, height = (str(round(side * _CSS_PIXELS_PER_PIXEL)) for side in struct.unpack(">II", png[16:24]))
    source = "data:image/png;base64," + base64.b64encode(png).decode()
    return element("figure", element("img", src=source, alt=description, width=width, height=height))
