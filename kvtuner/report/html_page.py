"""Fills the templates of HTML pages that need nothing else. Knows nothing of what a page says."""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass
from functools import cache
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.colors import to_rgba

from kvtuner.report.formatting import fixed
from kvtuner.report.layer_strip import bits_used, kinds_used
from kvtuner.report.plots.plot_style import BITS_COLOURS, ink_on

_CSS_PIXELS_PER_PIXEL: Final = 0.625  # pictures have 160 dots per inch; 100 CSS pixels are an inch here


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture inside of a page.

    Attributes:
        png: The bytes of the PNG file.
        description: The description for those who cannot see the picture.
    """

    png: bytes
    description: str

    @property
    def source(self) -> str:
        """The address that holds the picture itself."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()

    @property
    def width(self) -> int:
        """The width in CSS pixels."""
        return round(self._pixels()[0] * _CSS_PIXELS_PER_PIXEL)

    @property
    def height(self) -> int:
        """The height in CSS pixels."""
        return round(self._pixels()[1] * _CSS_PIXELS_PER_PIXEL)

    def _pixels(self) -> tuple[int, int]:
        width, height = struct.unpack_from(">II", self.png, 16)  # the start of the file's first chunk
        return width, height


def render(template: str, **context: object) -> str:
    """Fill a template of ``kvtuner/report/templates``; every value of the context is escaped."""
    return _environment().get_template(template).render(context)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("kvtuner.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    colours = {bits: (colour, ink_on(to_rgba(colour))) for bits, colour in BITS_COLOURS.items()}
    environment.globals.update(bits_colours=colours, bits_used=bits_used, kinds_used=kinds_used, fixed=fixed)
    return environment
