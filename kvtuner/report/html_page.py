"""Fills the templates of HTML pages that need nothing else. Knows nothing of what a page says."""

from __future__ import annotations

import base64
import struct
from functools import cache
from typing import TYPE_CHECKING, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.colors import to_rgba

from kvtuner.report.formatting import fixed
from kvtuner.report.layer_strip import BAND, KIND_CODES, bits_used, kinds_used
from kvtuner.report.plots.drawing import NUM_SERIES
from kvtuner.report.plots.style import BITS_COLOURS, ink_on
from kvtuner.report.table import markdown_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.report.plots.drawing import Drawing

WIDE_PICTURE: Final = 340
"""The CSS pixels from which on a picture is wider than a telephone's screen."""
_MARGIN: Final = 16.0
_GAP: Final = 40.0
_TITLE_HEIGHT: Final = 24.0
_CSS_PIXELS_PER_PIXEL: Final = 0.625  # pictures have 160 dots per inch; 100 CSS pixels are an inch here


def data_url(png: bytes) -> str:
    """The address that holds a PNG file itself."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def css_size(png: bytes) -> tuple[int, int]:
    """The width and the height of a picture in CSS pixels."""
    width, height = struct.unpack_from(">II", png, 16)  # the start of the file's first chunk
    return round(width * _CSS_PIXELS_PER_PIXEL), round(height * _CSS_PIXELS_PER_PIXEL)


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
    templates.filters.update(css_size=css_size, data_url=data_url, fixed=fixed, markdown_text=markdown_text)
    templates.globals.update(
        bits_colours={bits: (colour, ink_on(to_rgba(colour))) for bits, colour in BITS_COLOURS.items()},
        bits_used=bits_used,
        kinds_used=kinds_used,
        kind_codes=KIND_CODES,
        band=BAND,
        num_series=NUM_SERIES,
        wide_picture=WIDE_PICTURE,
    )
    return templates
