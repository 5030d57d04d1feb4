"""Fills the templates of HTML pages that need nothing else. Knows nothing of what a page says."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib import colormaps
from matplotlib.colors import to_hex, to_rgba

from kvtuner.report.formatting import fixed
from kvtuner.report.layer_strip import BAND, KIND_CODES, bits_used, kinds_used
from kvtuner.report.plots.drawing import NUM_SERIES
from kvtuner.report.plots.score_cells import NUM_SHADES
from kvtuner.report.plots.style import BITS_COLOURS, ink_on
from kvtuner.report.table import markdown_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.report.plots.drawing import Drawing

_MARGIN: Final = 16.0
_GAP: Final = 40.0
_TITLE_HEIGHT: Final = 24.0
_WORST_SHADE: Final = 0.66
"""The end of matplotlib's magma_r that cells reach: what is darker would vanish on a dark page."""

_OPTION: Final = re.compile(r"(?<!\S)--\w[\w-]*")


def render(template: str, **context: object) -> str:
    """Fill a template of ``kvtuner/report/templates``; every value of the context is escaped."""
    return environment().get_template(template).render(context)


def picture_file(drawings: Sequence[Drawing], titles: Sequence[str] = ()) -> str:
    """Drawings beside one another, with titles or without, as an SVG file that follows light and dark pages."""
    places = [_MARGIN]
    for drawing in drawings:
        places.append(places[-1] + drawing.width + _GAP)
    return render(
        "picture.html",
        drawings=drawings,
        titles=titles,
        margin=_MARGIN,
        places=places,
        title_height=_TITLE_HEIGHT if titles else 0.0,
        width=places[-1] - _GAP + _MARGIN,
        height=2 * _MARGIN + _TITLE_HEIGHT * bool(titles) + max(drawing.height for drawing in drawings),
    )


@cache
def environment() -> Environment:
    """The environment of all templates."""
    templates = Environment(
        loader=PackageLoader("kvtuner.report"),
        autoescape=True,
        # A name that the context lacks is an error, not an empty place on the page.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(fixed=fixed, markdown_text=markdown_text, whole_options=whole_options)
    templates.globals.update(
        bits_colours={bits: (colour, ink_on(to_rgba(colour))) for bits, colour in BITS_COLOURS.items()},
        bits_used=bits_used,
        kinds_used=kinds_used,
        kind_codes=KIND_CODES,
        band=BAND,
        num_series=NUM_SERIES,
        shades=[(to_hex(colour), "#fff" if ink_on(colour) == "white" else "#000") for colour in _shades()],
    )
    return templates


def whole_options(text: str) -> Markup:
    """The text with its command-line options kept on one line each: browsers break lines behind hyphens."""
    return Markup(_OPTION.sub(r'<span class="option">\g<0></span>', str(escape(text))))


def _shades() -> list[tuple[float, float, float, float]]:
    """The colours of cells, the worst last."""
    colours = colormaps["magma_r"]
    return [colours(_WORST_SHADE * shade / (NUM_SHADES - 1)) for shade in range(NUM_SHADES)]
