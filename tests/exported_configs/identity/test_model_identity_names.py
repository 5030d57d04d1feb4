"""What a model is called in profiles: by its hub id and commit, however it was typed, and never by a path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
from transformers import Qwen2Config

from kvtuner.exported_configs.identity.model_identity import identity_of, is_hub_id, public_name

if TYPE_CHECKING:
    from pathlib import Path

    from kvtuner.exported_configs.profile.records import ModelIdentity

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "89abcdef" * 5


def identity_with(config: Any = None, **changes: Any) -> ModelIdentity:
    fields: dict[str, Any] = {"id": "owner/name", "revision": None, "dtype": "bfloat16", **changes}
    return identity_of(Qwen2Config() if config is None else config, **fields)


def test_names_are_hub_ids_or_last_parts(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Owner--Name-7B.x" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    assert public_name(str(snapshot)) == public_name(f"{snapshot}/") == "Owner/Name-7B.x"
    assert public_name(str(snapshot.parent)) == "snapshots"
    assert public_name("/gone/hub/models--gpt2/snapshots/" + COMMIT) == "gpt2"
    assert public_name("Owner/Name-7B.x") == "Owner/Name-7B.x"
    assert public_name(str(tmp_path / ".hidden")) == "hidden"
    assert [is_hub_id(name) for name in ("a/b", "a", "a/b/c", "a/", "/b", "a b/c", "A-1/B_2.x")] == [
        *(True, False, False, False, False, False),
        True,
    ]


@pytest.mark.parametrize(
    "spelling", ["link", "link to a link", "dots", "dots that are gone", "relative", "home", "inside"]
)
def test_a_snapshot_is_known_by_whatever_path_leads_there(
    spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = tmp_path / "models--Qwen--X" / "snapshots"
    (snapshots / COMMIT / "part").mkdir(parents=True)
    (tmp_path / "qwen").symlink_to(snapshots / COMMIT)
    (tmp_path / "again").symlink_to(tmp_path / "qwen")
    monkeypatch.chdir(snapshots)
    monkeypatch.setenv("HOME", str(tmp_path))
    typed = {
        "link": f"{tmp_path}/qwen",
        "link to a link": f"{tmp_path}/again/",
        "dots": f"{snapshots}/./{COMMIT}/.",
        "dots that are gone": f"/gone/models--Qwen--X/refs/../snapshots/./{COMMIT}",
        "relative": COMMIT,
        "home": "~/qwen",
        "inside": f"{tmp_path}/qwen/part",
    }[spelling]
    identity = identity_with(id=typed)
    assert (identity.id, identity.revision) == ("Qwen/X", COMMIT)


def test_a_hub_id_that_is_typed_inside_a_snapshot_is_no_path_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "models--Qwen--X" / "snapshots" / COMMIT
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert (identity_with(id="Owner/Name").id, identity_with(id="Owner/Name").revision) == ("Owner/Name", None)
    assert public_name("") == "unnamed"


def test_a_folder_s_name_is_made_fit_for_a_profile(tmp_path: Path) -> None:
    for name, expected in (
        ("a\\b", "a_b"),
        ("\\", "_"),
        (". x", "x"),
        (" ~x ", "x"),
        ("a\tb", "a_b"),
        ("b" * 255, "b" * 200),
    ):
        (tmp_path / name).mkdir()
        assert identity_with(id=str(tmp_path / name)).id == expected


@pytest.mark.parametrize("owner", [0, 50, 199, 250])
def test_an_id_that_is_too_long_for_a_path_is_cut(owner: int) -> None:
    long = "o" * owner + "/" * (owner > 0) + "n" * (300 - owner)
    identity = identity_with(id=long, files=long)
    assert identity.id == long[:200].rstrip("/")
    assert (identity.revision, identity.checkpoint_sha256) == (None, None)
    assert identity_with(id="~nobody-of-this-machine", files="~nobody-of-this-machine").id == "nobody-of-this-machine"


def test_the_commit_stands_for_the_revision_where_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "models--Owner--Name"
    for commit in (COMMIT, OTHER_COMMIT):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").write_text("{}")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    (cache / "refs" / "v2").write_text(OTHER_COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.file_download.constants, "HF_HUB_CACHE", str(tmp_path))

    def revision(id: str, typed: str | None = None, config: Any = None) -> str | None:
        return identity_with(config, id=id, revision=typed).revision

    assert revision("Owner/Name") == revision("Owner/Name", "main") == revision("Owner/Name", COMMIT) == COMMIT
    assert revision("Owner/Name", "v2") == OTHER_COMMIT
    assert revision("Owner/Name", "v3") == "v3"
    assert revision("Owner/Other", "v3") == "v3"
    assert revision("Owner/Other") is None
    assert revision("a--b/c", "v3") == "v3"  # no repository is called so
    assert revision("folder") is None
    assert revision(str(cache / "snapshots" / OTHER_COMMIT)) == OTHER_COMMIT
    kept = Qwen2Config()
    kept._commit_hash = OTHER_COMMIT
    assert revision("Owner/Name", "main", kept) == OTHER_COMMIT
