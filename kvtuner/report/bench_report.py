"""Writes what a benchmark found: one HTML page that needs nothing else, Markdown, JSON, pictures. Measures nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from kvtuner.report.bench_sections import sections
from kvtuner.report.markup import Markup, element
from kvtuner.report.page import figure, page, section, table
from kvtuner.report.plots.bench_plots import charts
from kvtuner.run_folder import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvtuner.report.bench_result import BenchResult
    from kvtuner.report.bench_sections import ReportSection, Table

PAGE: Final = "bench.html"
MARKDOWN: Final = "bench.md"
JSON: Final = "bench.json"


def write_report(result: BenchResult, folder: Path) -> Path:
    """Write all of it; returns the path of the page.

    Raises:
        RunFolderError: the disk is full or the folder cannot be written.
    """
    pictures = charts(result)
    for name, png in pictures.items():
        write_atomically(folder / f"{name}.png", png)
    parts, title = sections(result), _title(result)
    write_atomically(folder / JSON, json.dumps(result.to_json(), indent=1) + "\n")
    write_atomically(folder / MARKDOWN, markdown(title, parts, pictures))
    write_atomically(folder / PAGE, html(title, parts, pictures).encode(errors="replace"))
    return folder / PAGE


def html(title: str, parts: Sequence[ReportSection], pictures: Mapping[str, bytes]) -> str:
    """The page, with its pictures inside."""
    return page(title, element("h1", title), *(_html_section(each, pictures) for each in parts))


def markdown(title: str, parts: Sequence[ReportSection], pictures: Mapping[str, bytes]) -> str:
    """The same; pictures lie beside it."""
    lines = [f"# {_plain(title)}", ""]
    for part in parts:
        lines += [f"## {part.title}", "", _plain(part.words), ""]
        if part.picture is not None and part.picture[0] in pictures:
            lines += [f"![{part.picture[1]}]({part.picture[0]}.png)", ""]
        for each in part.tables:
            lines += [*_markdown_table(each), ""]
    return "\n".join(lines)


def _title(result: BenchResult) -> str:
    return f"Serving {result.model.id} with a quantized KV cache: what it is worth"


def _html_section(part: ReportSection, pictures: Mapping[str, bytes]) -> Markup:
    shown = part.picture is not None and part.picture[0] in pictures
    drawn = [figure(pictures[part.picture[0]], part.picture[1])] if shown and part.picture is not None else []
    return section(part.title, part.words, *drawn, *(table(t.headers, t.rows, wrap=t.wrap) for t in part.tables))


def _markdown_table(found: Table) -> list[str]:
    lines = ["| " + " | ".join(map(_plain, found.headers)) + " |", "|" + " --- |" * len(found.headers)]
    return lines + ["| " + " | ".join(map(_plain, row)) + " |" for row in found.rows]


def _plain(text: str) -> str:
    """On one line, without what Markdown or HTML would take for its own."""
    escaped = "".join(f"\\{c}" if c in "\\|<>[]*_`#" else c for c in " ".join(text.split()))
    return escaped
