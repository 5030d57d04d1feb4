"""The page of serving names every flag of the plugin, but for those of the tiers below, and none that it has not."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kvtuner.runtime_loader.sglang.request import add_flags

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


def test_the_table_of_flags_names_those_of_the_plugin() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings if "kvtuner" in flag}
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `--")]
    named = set(re.findall(r"--[a-z-]*kvtuner-[a-z-]+", "\n".join(row.split(" | ")[0] for row in rows)))
    assert named == {flag for flag in flags if "hicache" not in flag}
