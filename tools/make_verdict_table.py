"""Print README's table of verdicts: the shipped profiles beside the best uniform of their budget, and fp8.

make verdicts
"""

from typing import Final

from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.sharing.catalogue import FOLDER
from kvtuner.exported_configs.verdict import TRANSFORMED, verdict_of
from kvtuner.report.formatting import number
from kvtuner.report.profile_report import ratio_to_bf16
from kvtuner.report.table import Table

ROWS: Final = (
    ("demo-3bit", "demo, 3bit"),
    ("demo-4bit", "demo, 4bit"),
    ("demo-6bit", "demo, 6bit"),
    ("demo-outliers-3bit", "twin, 3bit"),
    ("demo-outliers-4bit", "twin, 4bit"),
)
"""The profiles of the catalogue that have a row, and what the table calls them."""
HEADERS: Final = ("search", "tokens", "KL", "best uniform alike", "fp8", "verdict")


def verdict_table() -> Table:
    """A row for each profile of `ROWS`."""
    return Table(HEADERS, [_row(title, load_profile(FOLDER / f"{name}.json")) for name, title in ROWS])


def _row(title: str, profile: Profile) -> tuple[str, ...]:
    quality, verdict = profile.quality, verdict_of(profile)
    assert quality is not None and quality.best_uniform is not None and verdict is not None
    kl = {baseline.name: number(baseline.kl_mean) for baseline in quality.baselines}
    rival = quality.best_uniform.name
    size = f"{ratio_to_bf16(profile):.2f}x"
    uniform = f"{kl[rival]} ({rival.removesuffix(TRANSFORMED)})"
    return title, size, number(quality.measured_kl.mean), uniform, kl["fp8"], verdict.recommendation


if __name__ == "__main__":
    print("\n".join(verdict_table().markdown()))
