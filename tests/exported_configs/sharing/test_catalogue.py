"""The catalogue: its index says what its profiles are, and the right one is chosen, or none."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.build import dump_profile
from kvtuner.exported_configs.profile.evaluation_record import load_evaluation
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.records import ModelIdentity
from kvtuner.exported_configs.sharing.catalogue import (
    CATALOGUE_INDEX,
    FOLDER,
    Index,
    catalogue_file,
    choose,
    load_index,
)
from kvtuner.exported_configs.sharing.reference import find_profile
from kvtuner.run_folder import sha256_of
from kvtuner.search_spaces.budget import Budget
from tools.make_catalogue_index import index_text, make_index
from tools.make_schemas import INDEX_SCHEMA, schema_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtuner.exported_configs.profile.profile import Profile


def test_the_committed_index_is_that_of_the_committed_profiles() -> None:
    assert (FOLDER / CATALOGUE_INDEX).read_text(encoding="utf-8") == index_text(make_index())
    assert INDEX_SCHEMA.read_text(encoding="utf-8") == schema_text(Index)


def test_the_index_keeps_its_schema_by_an_independent_reader() -> None:
    schema = json.loads(INDEX_SCHEMA.read_text(encoding="utf-8"))
    index = json.loads((FOLDER / CATALOGUE_INDEX).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(index)
    index["profiles"][0]["extra"] = 1
    with pytest.raises(jsonschema.ValidationError, match="extra"):
        jsonschema.Draft202012Validator(schema).validate(index)


def test_every_entry_says_what_its_profile_and_evaluations_say() -> None:
    entries = load_index().profiles
    assert {(entry.model.id, entry.budget) for entry in entries} >= {
        (model, budget) for model in ("demo", "demo-outliers") for budget in ("3bit", "4bit", "6bit")
    }
    for entry in entries:
        profile = load_profile(catalogue_file(entry.name))
        document = json.loads(catalogue_file(entry.name).read_text(encoding="utf-8"))
        assert entry.digest == document["digest"] and entry.model.model_dump() == document["model"]
        assert entry.geometry_sha256 == sha256_of(document["geometry"])
        assert entry.bytes_per_token == document["budget"]["bytes_per_token"] == profile.bytes_per_token()
        assert entry.kl is not None and entry.kl.model_dump() == document["quality"]["measured_kl"]
        assert profile.provenance.command is not None and entry.evaluations
        for name in entry.evaluations:
            assert load_evaluation(FOLDER / name).profile_digest == entry.digest


def test_a_profile_of_the_catalogue_is_named_like_any_other() -> None:
    found = find_profile("catalogue:demo-4bit")
    assert found.profile.model.id == "demo" and found.profile.budget.asked == "4bit"
    assert find_profile(f"catalogue:demo-4bit#{found.profile.digest}") == found
    with pytest.raises(ProfileError, match="was asked for"):
        find_profile(f"catalogue:demo-4bit#sha256:{'0' * 64}")
    for name in ("catalogue:demo-5bit", "catalogue:../schema", "catalogue:", "catalogue:index"):
        with pytest.raises(ProfileError, match=r"the catalogue has no profile .*demo-4bit"):
            find_profile(name)


@pytest.fixture
def folder(tmp_path: Path, make_profile: Callable[..., Profile]) -> Callable[..., Path]:
    """A catalogue of profiles by name, of models with some fields replaced."""

    def make(*, has_evaluation: bool = True, **models: dict[str, Any]) -> Path:
        for name, fields in models.items():
            asked = fields.pop("asked", "4bit")
            profile = make_profile(model=identity(**fields))
            document = json.loads(dump_profile(profile))
            document["budget"]["asked"] = asked
            document["provenance"]["command"] = "kvtuner search"
            (tmp_path / f"{name}-1.json").write_text(json.dumps(document))
            if has_evaluation:
                evaluation = json.loads(next(FOLDER.glob("demo-4bit.evaluation-*.json")).read_text())
                evaluation["profile_digest"] = profile.digest
                (tmp_path / f"{name}-1.evaluation-x-1.json").write_text(json.dumps(evaluation))
        (tmp_path / CATALOGUE_INDEX).write_text(index_text(make_index(tmp_path)))
        return tmp_path

    return make


def identity(**fields: Any) -> ModelIdentity:
    plain = {
        "id": "owner/a",
        "revision": None,
        "config_sha256": "sha256:" + "1" * 64,
        "architecture": "TinyForCausalLM",
        "dtype": "bfloat16",
        "rope_sha256": "sha256:" + "2" * 64,
        "checkpoint_sha256": "sha256:" + "3" * 64,
    }
    return ModelIdentity.model_validate({**plain, **fields})


def test_models_of_one_configuration_are_told_apart_by_their_weights(folder: Callable[..., Path]) -> None:
    other = "sha256:" + "4" * 64
    place = folder(a={}, b={"id": "owner/b", "checkpoint_sha256": other})
    assert choose(identity(id="anything"), folder=place).name == "a-1.json"
    assert choose(identity(id="anything", checkpoint_sha256=other), folder=place).name == "b-1.json"
    with pytest.raises(ProfileError, match="no profile for owner/a"):
        choose(identity(checkpoint_sha256="sha256:" + "5" * 64), folder=place)


def test_where_weights_cannot_be_compared_the_name_decides(folder: Callable[..., Path]) -> None:
    place = folder(a={}, b={"id": "owner/b", "checkpoint_sha256": "sha256:" + "4" * 64})
    assert choose(identity(id="Owner/A", checkpoint_sha256=None), folder=place).name == "a-1.json"
    assert choose(identity(id="owner/b", checkpoint_sha256=None), folder=place).name == "b-1.json"
    assert choose(identity(id="owner/b"), folder=place).name == "a-1.json", "weights say more than a name"
    with pytest.raises(ProfileError, match="no profile for c"):
        choose(identity(id="c", checkpoint_sha256=None), folder=place)


@pytest.mark.parametrize(
    "fields",
    [
        {"config_sha256": "sha256:" + "9" * 64},
        {"rope_sha256": "sha256:" + "9" * 64},
        {"rope_sha256": None},
        {"architecture": "OtherForCausalLM"},
    ],
)
def test_another_model_by_the_same_name_gets_nothing(folder: Callable[..., Path], fields: dict[str, Any]) -> None:
    with pytest.raises(ProfileError, match="no profile for"):
        choose(identity(**fields), folder=folder(a={}))


def test_a_budget_is_chosen_by_its_name_and_4bit_without_one(folder: Callable[..., Path]) -> None:
    other = "sha256:" + "4" * 64
    place = folder(a3={"asked": "3bit"}, a4={"asked": "4bit"}, b={"id": "owner/b", "checkpoint_sha256": other})
    assert choose(identity(), folder=place).name == "a4-1.json"
    assert choose(identity(), "3bit", folder=place).name == "a3-1.json"
    with pytest.raises(ProfileError, match="0 profiles by budget '2bit' for owner/a, but 3bit, 4bit; name one"):
        choose(identity(), "2bit", folder=place)


@pytest.mark.parametrize("text", ["4bit", "4.0bit", "4BIT", "4 bit", " 04.00 Bits "])
def test_a_budget_is_chosen_in_every_spelling_that_a_search_takes(folder: Callable[..., Path], text: str) -> None:
    assert Budget.parse(text).text == "4bit"
    assert choose(identity(), text, folder=folder(a={"asked": "4bit"})).name == "a-1.json"


@pytest.mark.parametrize("text", ["40bit", "4.5bit", ".4bit", "4bpe", "4", "bit", "4bitbit", "4.bit", ""])
def test_another_budget_is_not_taken_for_a_spelling(folder: Callable[..., Path], text: str) -> None:
    with pytest.raises(ProfileError, match="0 profiles by budget"):
        choose(identity(), text, folder=folder(a={"asked": "4bit"}))


def test_an_index_is_not_made_of_what_does_not_belong_together(folder: Callable[..., Path]) -> None:
    place = folder(a={})
    evaluation = next(FOLDER.glob("demo-4bit.evaluation-*.json"))
    shutil.copy(evaluation, place / "a-1.evaluation-y-1.json")
    with pytest.raises(ProfileError, match=r"a-1\.evaluation-y-1\.json evaluates another profile than a-1\.json"):
        make_index(place)
    (place / "a-1.evaluation-y-1.json").rename(place / "z.evaluation-x-1.json")
    with pytest.raises(ProfileError, match="evaluates no profile of the catalogue"):
        make_index(place)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"catalogue_version": 1', '"catalogue_version": 2', "catalogue_version"),
        ('"name": "a-1"', '"name": "b-1"', "different and sorted"),
        ('"mean_bits"', '"mean"', "mean"),
        ("{", "[", "JSON"),
    ],
)
def test_a_wrong_index_is_refused(folder: Callable[..., Path], old: str, new: str, words: str) -> None:
    place = folder(a={}, b={"id": "owner/b", "checkpoint_sha256": "sha256:" + "4" * 64})
    path = place / CATALOGUE_INDEX
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ProfileError, match=words):
        load_index(place)


def test_a_profile_without_evidence_does_not_come_in(folder: Callable[..., Path]) -> None:
    with pytest.raises(ProfileError, match="a-1 lacks an evaluation; a profile of the catalogue brings its evidence"):
        folder(a={}, has_evaluation=False)
    with pytest.raises(ProfileError, match="lacks what its weights are known by"):
        folder(a={"checkpoint_sha256": None})
    with pytest.raises(ProfileError, match="two profiles of one model by one budget"):
        folder(a={}, b={})
