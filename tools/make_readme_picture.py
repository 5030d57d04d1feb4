"""Draw README's picture: the bits that a search chose over sensitivity, beside KL by stored bytes near the winner's.

make picture
"""

import argparse
from pathlib import Path
from typing import Final

from kvtuner.report.html_page import picture_file
from kvtuner.report.plots.bits_over_sensitivity import bits_over_sensitivity
from kvtuner.report.plots.kl_near_winner import kl_near_winner
from kvtuner.report.search_data import DATA_FILE, ReportData
from kvtuner.run_folder import RunFolder

PICTURE: Final = Path(__file__).parents[1] / "docs" / "pictures" / "demo-4bit.svg"
RUN_FOLDER: Final = Path("runs/demo-4bit")
"""The run folder of README's search."""
_TITLES: Final = (
    "Bits of each layer, above its cost alone at 2 bits",
    "KL by stored bytes of a token; less is better",
)
_BITS_WIDTH: Final = 320.0
_KL_WIDTH: Final = 500.0


def readme_picture(data: ReportData) -> str:
    """The picture as an SVG file, for light and dark pages."""
    drawings = [bits_over_sensitivity(data, _BITS_WIDTH), kl_near_winner(data.quality[0], _KL_WIDTH)]
    return picture_file(drawings, _TITLES)


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
