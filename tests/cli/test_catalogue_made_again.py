"""The catalogue's own commands make its profiles again: layers and bytes exactly, measured figures to 1 %.

`make catalogue` made them (tools/make_catalogue.py). Another processor, or another number of threads, adds floats
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


def recorded_command(name: str, model: str) -> list[str]:
    """The command that made a profile of the catalogue, of a model in the folder that it has here."""
    committed = json.loads(catalogue_file(name).read_text(encoding="utf-8"))
    command = shlex.split(committed["provenance"]["command"])
    assert command[:4] == ["kvtuner", "search", "--budget", committed["budget"]["asked"]]
    place = command.index("--model") + 1
    assert command[place] == committed["model"]["id"]
    command[place] = model
    return command[1:]


def make_again(run: RunCommand, name: str, model: str, out: Path) -> dict[str, Any]:
    """The profile that the recorded command of the catalogue's makes."""
    status, _, err = run(*recorded_command(name, model), "--no-report", "--out", out)
    assert status == 0, err
    profile: dict[str, Any] = json.loads((out / "profile.json").read_text())
    return profile


def assert_made_again(name: str, again: dict[str, Any]) -> None:
    committed = json.loads(catalogue_file(name).read_text(encoding="utf-8"))
    for field in ("geometry", "defaults", "budget", "layout"):
        assert again[field] == committed[field]
    kept = {"layer", "bits", "transform"}
    for mine, theirs in zip(again["layers"], committed["layers"], strict=True):
        assert only(mine, kept) == only(theirs, kept), f"layer {theirs['layer']}"
    for field in ("kl_p99", "top1_agreement", "perplexity", "reference_perplexity"):
        assert again["quality"][field] == pytest.approx(committed["quality"][field], rel=0.01)
    measured, before = again["quality"]["measured_kl"], committed["quality"]["measured_kl"]
    for field in ("mean", "low", "high"):
        assert measured[field] == pytest.approx(before[field], rel=0.01)
    again_baselines = {row["name"]: row["kl_mean"] for row in again["quality"]["baselines"]}
    baselines = {row["name"]: row["kl_mean"] for row in committed["quality"]["baselines"]}
    assert again_baselines == pytest.approx(baselines, rel=0.01)
    assert again["provenance"]["calibration"] == committed["provenance"]["calibration"]


def only(node: Any, fields: set[str]) -> Any:
    """A layer without its constants, which are measured: their floats may differ in the last digit."""
    if isinstance(node, dict):
        return {name: only(value, fields) for name, value in node.items() if name in fields or name in ("k", "v")}
    return node


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["3bit", "4bit", "6bit"])
def test_the_recorded_command_is_still_taken(run: RunCommand, tmp_path: Path, budget: str) -> None:
    status, _, err = run(*recorded_command(f"demo-{budget}", "demo"), "--dry-run", "--out", tmp_path / "run")
    assert status == 0, err


@pytest.mark.full
@pytest.mark.parametrize("budget", ["3bit", "4bit", "6bit"])
@pytest.mark.parametrize("model", ["demo", "demo-outliers"])
def test_every_profile_is_made_again(run: RunCommand, tmp_path: Path, model: str, budget: str) -> None:
    place = "demo"
    if model == "demo-outliers":
        place = str(tmp_path / model)
        make_twin("demo", tmp_path / model)
    assert_made_again(f"{model}-{budget}", make_again(run, f"{model}-{budget}", place, tmp_path / "run"))
