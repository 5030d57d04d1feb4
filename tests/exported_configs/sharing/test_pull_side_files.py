"""Profiles of two files over real HTTP and in the store: pushed, pulled and signed together, or refused by name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvtuner.errors import ProfileError, SignatureError
from kvtuner.exported_configs.profile.build import dump_constants, dump_profile, place_constants, write_profile
from kvtuner.exported_configs.profile.constants_file import constants_path
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.profile_store import all_stored
from kvtuner.exported_configs.sharing.pull import pull
from kvtuner.exported_configs.sharing.push import plan_upload, push
from kvtuner.exported_configs.sharing.reference import HubReference, find_profile
from kvtuner.exported_configs.signing.profile_signature import sign_profile, verify_profile
from kvtuner.exported_configs.signing.signer import Signer, SignerIdentity
from kvtuner.pipeline.published_files import copy_fetched, published_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hub_server import LoopbackHub

    from kvtuner.exported_configs.profile.profile import Profile

REPO = "me/tiny-kv4"
MAIN = HubReference(REPO, "main")
SIDE = "profile.constants.safetensors"


@pytest.fixture
def placed(profile: Profile) -> Profile:
    return place_constants(profile, "file")


@pytest.fixture
def files(placed: Profile) -> dict[str, bytes]:
    return {"profile.json": dump_profile(placed), SIDE: dump_constants(placed) or b""}


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own, of httpx
def test_both_files_are_published_fetched_kept_and_copied(
    hub: LoopbackHub, placed: Profile, files: dict[str, bytes], tmp_path: Path
) -> None:
    source = tmp_path / "run" / "profile-4bit.json"
    write_profile(source, placed)
    published = published_files(source, REPO, license_id="mit", with_report=False)
    assert {name: published[name] for name in files} == files
    pushed = push(plan_upload(REPO, published), "both")
    fetched = pull(MAIN.at(pushed.commit))
    assert fetched.profile == placed and fetched.path.with_name(SIDE).read_bytes() == files[SIDE]
    assert [stored.profile for stored in all_stored()] == [placed]
    assert find_profile(f"{REPO}@{pushed.commit}#{placed.digest}").profile == placed
    copy_fetched(fetched, tmp_path / "mine.json", tmp_path / "mine.json.sig")
    assert load_profile(tmp_path / "mine.json") == placed


def test_copy_of_a_profile_of_one_file_removes_the_side_file_of_another(
    hub: LoopbackHub, placed: Profile, data: bytes, tmp_path: Path
) -> None:
    hub.repo(REPO, {"profile.json": data})
    write_profile(tmp_path / "mine.json", placed)
    copy_fetched(pull(MAIN), tmp_path / "mine.json", tmp_path / "mine.json.sig")
    assert load_profile(tmp_path / "mine.json").constants_sha256 is None


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (None, "which the repository does not have; ask its owner"),
        (b"", "it was changed, cut or exchanged"),
        (b"\0" * 64, "it was changed, cut or exchanged"),
    ],
)
def test_repository_without_the_right_side_file_is_refused(
    hub: LoopbackHub, files: dict[str, bytes], side: bytes | None, message: str
) -> None:
    hub.repo(REPO, {"profile.json": files["profile.json"], **({} if side is None else {SIDE: side})})
    with pytest.raises(ProfileError, match=f"holds no valid profile: .*{message}"):
        pull(MAIN)
    assert not list(all_stored())


def test_side_file_in_folders_of_a_repository_lies_beside_its_profile(
    hub: LoopbackHub, placed: Profile, files: dict[str, bytes]
) -> None:
    hub.repo(REPO, {f"a/b/{name}": data for name, data in files.items()})
    assert pull(HubReference(REPO, "main", "a/b/profile.json")).profile == placed


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_kept_profile_with_a_damaged_side_file_is_fetched_again(
    hub: LoopbackHub, placed: Profile, files: dict[str, bytes], damage: str
) -> None:
    oid = hub.repo(REPO, files).refs["main"]
    kept = pull(MAIN.at(oid)).path.with_name(SIDE)
    if damage == "cut":
        kept.write_bytes(files[SIDE][:-1])
    else:
        kept.unlink()
    assert not list(all_stored())
    assert pull(MAIN.at(oid)).profile == placed and kept.read_bytes() == files[SIDE]


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_push_of_one_file_removes_the_side_file_of_the_profile_that_it_replaces(
    hub: LoopbackHub, data: bytes, files: dict[str, bytes]
) -> None:
    repo = hub.repo(REPO, {**files, "other.constants.safetensors": b"mine"})
    pushed = push(plan_upload(REPO, {"profile.json": data}), "inline")
    assert set(repo.commits[pushed.commit]) == {".gitattributes", "profile.json", "other.constants.safetensors"}


def test_links_are_not_published(placed: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, placed)
    side = constants_path(path)
    side.rename(tmp_path / "elsewhere")
    side.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ProfileError, match="is a link, and a push takes files only"):
        published_files(path, REPO, license_id="mit", with_report=False)


@pytest.mark.parametrize("name", ["profile.constants.safetensors", "profile.json.sig", "report.html"])
def test_named_pipes_are_not_published_nor_waited_for(placed: Profile, tmp_path: Path, name: str) -> None:
    write_profile(tmp_path / "profile.json", placed)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ProfileError, match=rf"{name} cannot be read \(a named pipe, where a file is expected\)"):
        published_files(tmp_path, REPO, license_id="mit", with_report=True)


def test_kept_profile_with_a_pipe_in_place_of_its_side_file_is_fetched_again(
    hub: LoopbackHub, placed: Profile, files: dict[str, bytes]
) -> None:
    oid = hub.repo(REPO, files).refs["main"]
    kept = pull(MAIN.at(oid)).path.with_name(SIDE)
    kept.unlink()
    os.mkfifo(kept)
    assert not list(all_stored()) and pull(MAIN.at(oid)).profile == placed


def test_signature_covers_both_files(
    placed: Profile, tmp_path: Path, keys: Callable[..., tuple[Path, Path]], profile: Profile
) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, placed)
    side, (private, public) = constants_path(path), keys()
    sign_profile(path, Signer(private))
    identity = SignerIdentity.parse(f"key:{public}")
    assert verify_profile(path, identity).profile == placed
    whole = side.read_bytes()
    for data in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), whole + b"\0"):
        side.write_bytes(data)
        for refused in (lambda: verify_profile(path, identity), lambda: sign_profile(path, Signer(private))):
            with pytest.raises(ProfileError, match="it was changed, cut or exchanged"):
                refused()
    side.unlink()
    with pytest.raises(ProfileError, match=r"its constants are in profile.constants.safetensors beside it"):
        verify_profile(path, identity)
    path.write_bytes(dump_profile(profile))  # the same constants in one file
    with pytest.raises(SignatureError, match="was changed after it was signed"):
        verify_profile(path, identity)
