"""README's results table is the committed one, and the committed report says what its JSON says."""

from __future__ import annotations

import json
from pathlib import Path

from kvtuner.bench.ways import GROUPS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "ablation-cpu"


def first_table(text: str, header: str) -> list[str]:
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(header))
    end = next(index for index in range(start, len(lines) + 1) if index == len(lines) or not lines[index].strip())
    return lines[start:end]


def test_readme_shows_the_committed_table_and_the_command_that_makes_it() -> None:
    header = "|  | bits | bytes/token | tokens that fit | KL nats/token |"
    readme = (ROOT / "README.md").read_text()
    assert first_table(readme, header) == first_table((RESULTS / "bench.md").read_text(), header)
    assert "make ablation" in readme
    assert "\nablation:" in (ROOT / "Makefile").read_text()


def test_committed_results_have_every_group_measured_or_refused_by_name_and_pass_their_gates() -> None:
    found = json.loads((RESULTS / "bench.json").read_text())
    assert found["problems"] == []
    assert {way["group"] for way in found["ways"]} == {*GROUPS, None}
    for way in found["ways"]:
        assert way["refused"] is None or "per-channel" in way["refused"]
        assert way["refused"] or way["loads"]
        assert way["refused"] or way["harness"]["overhead"] < 0.05, "the harness took less than it measured by far"
    assert found["making"]["machine"] in (RESULTS / "bench.md").read_text().replace("\\", "")
