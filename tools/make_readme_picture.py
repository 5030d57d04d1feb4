"""Draw README's picture: the bits that a search chose over sensitivity, beside KL by stored bytes near the winner's.

make picture
"""

import argparse
from pathlib import Path
from typing import Final

from kvtuner.report.html_page import environment
from kvtuner.report.plots.bits_over_sensitivity import bits_over_sensitivity
from kvtuner.report.plots.kl_near_winner import kl_near_winner
from kvtuner.report.search_data import DATA_FILE, ReportData
from kvtuner.run_folder import RunFolder

PICTURE: Final = Path(__file__).parents[1] / "docs" / "pictures" / "demo-4bit.svg"
RUN_FOLDER: Final = Path("runs/demo-4bit")
"""The run folder of README's search."""
_TEMPLATE: Final = """\
{% from "drawing.html" import marks %}
<svg xmlns="http://www.w3.org/2000/svg" width="{{ width }}" height="{{ height }}"
 viewBox="0 0 {{ width }} {{ height }}">
<style>
{% include "styles/colours.html" %}
{% include "styles/drawing.html" %}
</style>
<rect width="{{ width }}" height="{{ height }}" fill="var(--back)"/>
{% for drawing in drawings %}
<g class="drawing" transform="translate({{ places[loop.index0] }} {{ margin }})">
<text y="6" class="strong">{{ titles[loop.index0] }}</text>
<g transform="translate(0 24)">
{{ marks(drawing) }}
</g>
</g>
{% endfor %}
</svg>
"""
_TITLES: Final = (
    "Bits of each layer, above its cost alone at 2 bits",
    "KL by stored bytes of a token; less is better",
)
_BITS_WIDTH: Final = 320.0
_KL_WIDTH: Final = 500.0
_MARGIN: Final = 16.0
_GAP: Final = 40.0
_TITLE_HEIGHT: Final = 24.0


def readme_picture(data: ReportData) -> str:
    """The picture as an SVG file, for light and dark pages."""
    drawings = [bits_over_sensitivity(data, _BITS_WIDTH), kl_near_winner(data.quality[0], _KL_WIDTH)]
    return (
        environment()
        .from_string(_TEMPLATE)
        .render(
            drawings=drawings,
            titles=_TITLES,
            margin=_MARGIN,
            places=(_MARGIN, _MARGIN + _BITS_WIDTH + _GAP),
            width=2 * _MARGIN + _GAP + _BITS_WIDTH + _KL_WIDTH,
            height=2 * _MARGIN + _TITLE_HEIGHT + max(drawing.height for drawing in drawings),
        )
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=RUN_FOLDER, help="run folder of a finished search")
    args = parser.parse_args()
    data = ReportData.from_json(RunFolder(args.run).read_checked(DATA_FILE))
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(readme_picture(data), encoding="utf-8")


if __name__ == "__main__":
    main()
