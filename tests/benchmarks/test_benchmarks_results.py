"""Tables of README and docs are the committed ones, and the committed report says what its JSON says."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from kvtuner.bench.ablation import GROUPS
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.verdict import verdict_of
from kvtuner.precision import ALL_BITS
from kvtuner.report.formatting import number
from tools.make_readme_picture import PICTURE
from tools.make_verdict_table import verdict_table

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = ROOT / "exported_configs" / "profiles"
RESULTS = ROOT / "benchmarks" / "results" / "ablation-cpu"


def first_table(text: str, header: str) -> list[str]:
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(header))
    end = next(index for index in range(start, len(lines) + 1) if index == len(lines) or not lines[index].strip())
    return lines[start:end]


def test_page_shows_the_committed_table_and_the_command_that_makes_it() -> None:
    header = "|  | bits | bytes/token | tokens that fit | KL nats/token |"
    page = (ROOT / "docs" / "benchmark.md").read_text()
    assert first_table(page, header) == first_table((RESULTS / "bench.md").read_text(), header)
    assert "make ablation" in page
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
    readme = (ROOT / "README.md").read_text()
    profile = load_profile(CATALOGUE / "demo-4bit.json")
    assert profile.provenance.command == "kvtuner search --budget 4bit --model demo"
    verdict = verdict_of(profile)
    assert verdict is not None and verdict.recommendation == "use"
    printed = readme[readme.index("    verdict  ") : readme.index("    profile: ")]
    words = printed.replace("verdict  ", " ").replace("advice  ", " ").split()
    assert words == str(verdict).split()
    for side in ("k", "v"):
        bits = "".join(str(getattr(pair, f"{side}_bits")) for pair in profile.pairs)
        assert f"    {side.upper()} bits      {bits}\n" in readme
    assert profile.quality is not None and f" {number(profile.quality.measured_kl.mean)} [" in readme


def test_readme_has_the_verdicts_of_the_catalogue() -> None:
    table = verdict_table().markdown()
    assert first_table((ROOT / "README.md").read_text(), table[0]) == table


def test_readmes_picture_has_the_bits_and_the_kl_of_the_same_search() -> None:
    marks = [element for element in ElementTree.parse(PICTURE).iter() if element.tag.endswith("}text")]
    # A mark's text stands behind its title.
    texts = [(mark.text or "") + "".join(child.tail or "" for child in mark) for mark in marks]
    profile = load_profile(CATALOGUE / "demo-4bit.json")
    for side in ("k", "v"):
        first = texts.index("keys" if side == "k" else "values") + 1
        drawn = [text for text in texts[first:] if text in {str(bits) for bits in ALL_BITS}][: len(profile.pairs)]
        assert drawn == [str(getattr(pair, f"{side}_bits")) for pair in profile.pairs]
    assert f"{profile.bytes_per_token():,}" in texts and "4bit" in texts
    assert f"({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


def test_readme_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1000
