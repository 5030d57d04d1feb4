"""README's results table is the committed one, and the committed report says what its JSON says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvtuner.bench.ablation import GROUPS

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = ROOT / "exported_configs" / "profiles"
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
    assert {scheme["group"] for scheme in found["ways"]} == {*GROUPS.values(), None}
    for scheme in found["ways"]:
        assert scheme["refused"] is None or "per-channel" in scheme["refused"]
        if scheme["refused"]:
            continue
        assert scheme["loads"]
        assert scheme["harness"]["overhead"] < 0.05, "the harness took far less than it measured"
    assert found["making"]["machine"] in (RESULTS / "bench.md").read_text().replace("\\", "")


def test_readmes_search_is_the_one_that_made_the_catalogues_profile() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if "quality at small positions" in line)
    printed = {row[2]: row for line in lines[start : start + 20] if (row := ROW.match(line)) is not None}
    (file,) = CATALOGUE.glob("demo-3bit.evaluation-*.json")
    cells = {(cell["measure"], cell["position"]): cell["results"] for cell in json.loads(file.read_text())["cells"]}
    shares = {found["subject"]: found["mean"] for found in cells["top1_agreement", 0]}
    # An evaluation's K8V8 has neither the grids nor the window of a search.
    for found in (cell for cell in cells["kl_nats_per_token", 0] if cell["subject"] in ("profile", "fp8")):
        row = printed["3bit" if found["subject"] == "profile" else found["subject"]]
        for shown, figure in zip(row.group(3, 4, 5), (found["mean"], found["low"], found["high"]), strict=True):
            assert float(shown) == pytest.approx(figure, rel=0.006), row[0]
        assert float(row[6]) == pytest.approx(100 * shares[found["subject"]], abs=0.051), row[0]
    profile = json.loads((CATALOGUE / "demo-3bit.json").read_text())
    assert profile["provenance"]["command"] == "kvtuner search --budget 3bit --model demo"
    assert set(printed) >= {"3bit", "K8V8", "fp8", "K4V2 +t"}


# marker, name, bits and stored, KL with its interval, verdict, p99, top-1
ROW = re.compile(r"    ([* ]) (\S+(?: \+t)?) +\d\S+ +\d\S+ +(\S+) \[(\S+), (\S+)\] .*?(\d+\.\d)% ")
