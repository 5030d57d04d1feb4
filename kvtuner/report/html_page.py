"""Fills the templates of HTML pages that need nothing else. Knows nothing of what a page says."""

from __future__ import annotations

import base64
import struct
from functools import cache
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.colors import to_rgba

from kvtuner.report.formatting import fixed
from kvtuner.report.layer_strip import BAND, KIND_CODES, bits_used, kinds_used
from kvtuner.report.plots.style import BITS_COLOURS, ink_on
from kvtuner.report.table import markdown_text

WIDE_PICTURE: Final = 340
"""The CSS pixels from which on a picture is wider than a telephone's screen."""
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
        wide_picture=WIDE_PICTURE,
    )
    return templates
