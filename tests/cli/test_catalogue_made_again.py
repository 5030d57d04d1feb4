"""The catalogue's own commands make its profiles again: layers and bytes exactly, measured figures to 1 %.

`make catalogue` made them (benchmarks/make_catalogue.py). Another processor, or another number of threads, adds floats
in another order; that must change figures in their last digits alone.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.calibration.demo.outliers import make_twin
from kvtuner.exported_configs.sharing.catalogue import catalogue_file

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import RunCommand


def make_again(run: RunCommand, name: str, model: str, out: Path) -> dict[str, Any]:
    """The profile that the recorded command of the catalogue's makes."""
    committed = json.loads(catalogue_file(name).read_text(encoding="utf-8"))
    words = shlex.split(committed["provenance"]["command"])
    assert words[:4] == ["kvtuner", "search", "--budget", committed["budget"]["asked"]]
    place = words.index("--model") + 1
    assert words[place] == committed["model"]["id"]
    words[place] = model  # where the twin's folder lies here
    status, _, err = run(*words[1:], "--no-report", "--out", out)
    assert status == 0, err
    made: dict[str, Any] = json.loads((out / "profile.json").read_text())
    return made


def compare(name: str, again: dict[str, Any]) -> None:
    committed = json.loads(catalogue_file(name).read_text(encoding="utf-8"))
    for field in ("geometry", "defaults", "budget", "layout"):
        assert again[field] == committed[field]
    kept = {"layer", "bits", "transform"}
    for mine, theirs in zip(again["layers"], committed["layers"], strict=True):
        assert only(mine, kept) == only(theirs, kept)
    for field in ("kl_p99", "top1_agreement", "perplexity", "reference_perplexity"):
        assert again["quality"][field] == pytest.approx(committed["quality"][field], rel=0.01)
    measured, before = again["quality"]["measured_kl"], committed["quality"]["measured_kl"]
    for field in ("mean", "low", "high"):
        assert measured[field] == pytest.approx(before[field], rel=0.01)
    again_baselines = {each["name"]: each["kl_mean"] for each in again["quality"]["baselines"]}
    baselines = {each["name"]: each["kl_mean"] for each in committed["quality"]["baselines"]}
    assert again_baselines == pytest.approx(baselines, rel=0.01)
    assert again["provenance"]["calibration"] == committed["provenance"]["calibration"]


def only(node: Any, fields: set[str]) -> Any:
    """A layer without its constants, which are measured: their floats may differ in the last digit."""
    if isinstance(node, dict):
        return {name: only(value, fields) for name, value in node.items() if name in fields or name in ("k", "v")}
    return node


@pytest.mark.slow
def test_the_demo_models_profile_is_made_again_by_its_own_command(run: RunCommand, tmp_path: Path) -> None:
    compare("demo-4bit", make_again(run, "demo-4bit", "demo", tmp_path / "run"))


@pytest.mark.full
@pytest.mark.parametrize("budget", ["3bit", "4bit", "6bit"])
@pytest.mark.parametrize("model", ["demo", "demo-outliers"])
def test_every_profile_is_made_again(run: RunCommand, tmp_path: Path, model: str, budget: str) -> None:
    place = "demo"
    if model == "demo-outliers":
        place = str(tmp_path / model)
        make_twin("demo", tmp_path / model)
    compare(f"{model}-{budget}", make_again(run, f"{model}-{budget}", place, tmp_path / "run"))
