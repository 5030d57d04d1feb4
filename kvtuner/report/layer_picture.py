"""Layers as a strip of HTML in bands of ten, with words for those who do not see it. Knows nothing of pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from matplotlib.colors import to_rgba

from kvtuner.report.layer_codes import KIND_CODES, bits_used, kinds_used
from kvtuner.report.markup import Markup, element
from kvtuner.report.plots.plot_style import BITS_COLOURS, ink_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.report.layer_codes import LayerCode

_BAND: Final = 10  # layers that stay side by side on the narrowest screen
_ROWS: Final = ("K", "V", "K kind", "V kind")
_STYLE: Final = """
.strip, .legend, .strip ol { list-style: none; display: flex; flex-wrap: wrap; margin: 0; padding: 0; }
.strip, .legend { margin: 1rem 0; }
.strip { gap: .8rem 1.2rem; font-size: .8rem; overflow-wrap: normal; }
.band { display: flex; max-width: 100%; overflow-x: auto; }
.strip ol { gap: 1px; flex-wrap: nowrap; }
.strip li { width: 1.6rem; text-align: center; position: relative; }
.strip li > span, .names > span { display: block; height: 1.2rem; line-height: 1.2rem; white-space: pre; }
.names { padding-right: .4rem; color: var(--soft); font-size: .7rem; }
.strip .number { color: var(--soft); font-size: .7rem; }
.strip .kind, .legend .kind { font-family: ui-monospace, monospace; }
.strip .mark { font-weight: 700; }
.strip li > .words {
  position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap;
}
.legend { gap: .3rem 1rem; font-size: .85rem; }
.legend .cell { display: inline-block; min-width: 1.7rem; padding: 0 .3rem; text-align: center; }
.cell { border-radius: 2px; font-variant-numeric: tabular-nums; }
th { white-space: normal; }
@media (max-width: 30rem) {
  table { font-size: .8rem; }
  th, td { padding-right: .4rem; }
  td.wrap { min-width: 4.5rem; }
}
* + article { margin-top: 4rem; border-top: 3px solid var(--line); padding-top: 1.5rem; }
pre {
  margin: .75rem 0; padding: .6rem .8rem; border: 1px solid var(--line); border-radius: 6px; font-size: .85rem;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
"""


def strip_style() -> Markup:
    """What a page with strips needs beside the common style."""
    widths = "".join(
        f".b{bits} {{ background: {colour}; color: {ink_on(to_rgba(colour))}; }}\n"
        for bits, colour in BITS_COLOURS.items()
    )
    return Markup(_STYLE + widths)


def strip_markup(*profiles: Sequence[LayerCode], changed: Mapping[int, str] | None = None) -> Markup:
    """One column for each layer: its number, then widths and kinds of every profile.

    Args:
        profiles: layers of one length.
        changed: for layers that differ, in what; None draws no marks.
    """
    names = [name for number, _ in enumerate(profiles, 1) for name in _names(number if len(profiles) > 1 else None)]
    heads = ["layer", *names, *([] if changed is None else ["changed"])]
    named = element("div", *map(_cell, heads), class_="names", aria_hidden="true")
    columns = [_column(codes, changed) for codes in zip(*profiles, strict=True)]
    bands = [columns[first : first + _BAND] for first in range(0, len(columns), _BAND)]
    return element(
        "div", *(element("div", named, element("ol", *band), class_="band") for band in bands), class_="strip"
    )


def legend_markup(codes: Sequence[LayerCode]) -> Markup:
    """What colours and letters of strips mean, as far as they occur."""
    widths = [
        element("li", element("span", str(bits), class_=f"cell b{bits}"), f" {bits} bits")
        for _, bits in bits_used(codes)
    ]
    kinds = [element("li", element("span", code, class_="cell kind"), f" {name}") for code, name in kinds_used(codes)]
    return element("ul", *widths, *kinds, class_="legend")


def _names(number: int | None) -> list[str]:
    return list(_ROWS) if number is None else [f"{number}: {name}" for name in _ROWS]


def _column(codes: Sequence[LayerCode], changed: Mapping[int, str] | None) -> Markup:
    layer = codes[0].layer
    words = f"layer {layer}: " + "; then ".join(code.words() for code in codes)
    cells = [_cell(str(layer), "number")]
    for code in codes:
        cells += [_cell(str(bits), f"cell b{bits}") for bits in (code.k_bits, code.v_bits)]
        cells += [_cell(KIND_CODES[kind], "cell kind") for kind in (code.k_kind, code.v_kind)]
    if changed is not None:
        what = changed.get(layer)
        words += f"; changed: {what}" if what else "; not changed"
        cells.append(_cell(" " if what is None else "~" if what == "constants" else "^", "mark"))
    return element("li", element("span", words, class_="words"), *cells, title=words)


def _cell(text: str, kind: str = "") -> Markup:
    named = {"class_": kind} if kind else {}
    return element("span", text, aria_hidden="true", **named)
