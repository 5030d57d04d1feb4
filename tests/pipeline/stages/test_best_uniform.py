"""The fair rival of a profile is the one that a search with --layers makes of the same table, or is refused by name."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import kvtuner
from kvtuner.calibration.sensitivity import TABLE_FILE
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.build import write_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.sharing.reference import find_profile
from kvtuner.pipeline.stages.best_uniform import best_uniform_scheme

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import ModelFolder

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"sequence_length": 64, "sequences": (2, 2, 3), "fisher_draws": 1, "report": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: ModelFolder, corpus_file: Path) -> Path:
    """The run folder of a search whose winner mixes pairs."""
    out = tmp_path_factory.mktemp("search") / "run"
    found = kvtuner.search(model_folder("llama-gqa"), data=corpus_file, budget="5bit", trials=2, out=out, **SMALL)
    assert len(set(found.profile.pairs)) > 1
    return out


def test_it_is_the_profile_that_a_search_with_layers_makes_of_the_table(
    run: Path, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path
) -> None:
    resolved = find_profile(str(run))
    scheme, quality = best_uniform_scheme(resolved), resolved.profile.quality
    assert quality is not None and quality.best_uniform is not None
    assert scheme.name == quality.best_uniform.name and scheme.name.endswith(" + transforms")
    (pair,) = set(scheme.pairs)
    assert scheme.name == f"{pair} + transforms" and scheme.has_transforms
    for name in ("run.json", TABLE_FILE, "isolated.jsonl", "scale-layouts.jsonl"):
        shutil.copy(run / name, tmp_path)
    by_hand = kvtuner.search(
        model_folder("llama-gqa"), data=corpus_file, layers=f"0-2:{pair}", out=tmp_path, **SMALL
    ).profile
    assert scheme.profile.digest == by_hand.digest
    assert scheme.profile.window == resolved.profile.window and scheme.profile.quality is None


def test_an_evaluation_asks_it_by_its_word(run: Path, corpus_file: Path, model_folder: ModelFolder) -> None:
    found = kvtuner.evaluate(
        run, model=model_folder("llama-gqa"), data=corpus_file, levels="likelihood", against="best-uniform"
    )
    name = best_uniform_scheme(find_profile(str(run))).name
    kl = {row.scheme: row.mean for row in found.evaluation.cells[0].results}
    assert set(kl) == {"profile", name} and kl[name] > 0
    assert "--against best-uniform" in found.evaluation.provenance.command


def refusal(folder: Path) -> str:
    with pytest.raises(ProfileError) as found:
        best_uniform_scheme(find_profile(str(folder)))
    assert str(folder) not in str(found.value), "it stands in a report that may be shared"
    return str(found.value)


def test_a_bare_profile_file_has_none(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "profile.json", tmp_path)
    assert f"has no {TABLE_FILE} beside it" in refusal(tmp_path)
    assert "give the run folder of its search" in refusal(tmp_path)


def test_a_damaged_table_is_named(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "profile.json", tmp_path)
    (tmp_path / TABLE_FILE).write_text((run / TABLE_FILE).read_text().replace('"layer": 1', '"layer": 0', 1))
    assert "is damaged or of another version; delete it" in refusal(tmp_path)


def test_a_profile_that_nothing_was_measured_of_has_none(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / TABLE_FILE, tmp_path)
    profile = load_profile(run / "profile.json")
    write_profile(tmp_path / "profile.json", Profile(**{**dict(profile), "quality": None}))
    assert "names no best uniform in its budget" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["the same", "other"])
def test_a_table_of_another_search_is_refused(
    run: Path, text: str, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path
) -> None:
    """The constants in the profile tell another model on the same text, and a hash tells other text."""
    model, changes = ("llama-gqa", {"sequences": (3, 2, 3)}) if text == "other" else ("phi3", {})
    options = {name: SMALL[name] for name in ("sequence_length", "sequences", "fisher_draws")} | changes
    kvtuner.calibrate(model_folder(model), data=corpus_file, score="fisher", out=tmp_path, **options)
    shutil.copy(run / "profile.json", tmp_path)
    assert f"the {TABLE_FILE} beside profile.json is of another search" in refusal(tmp_path)


def test_a_profile_that_is_the_best_uniform_says_so(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / TABLE_FILE, tmp_path)
    resolved = find_profile(str(run))
    rival = best_uniform_scheme(resolved).profile
    write_profile(
        tmp_path / "profile.json",
        Profile(**{**dict(rival), "quality": resolved.profile.quality, "provenance": resolved.profile.provenance}),
    )
    assert "is the best uniform in its budget itself, K" in refusal(tmp_path)
