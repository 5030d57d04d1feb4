"""Fetching and pushing over real HTTP: what is verified, what is kept, and one clear line for every fault."""

from __future__ import annotations

import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import HfApi, constants

from kvtuner.errors import HubError, ProfileError, RunFolderError
from kvtuner.exported_configs.profile.evaluation_record import evaluation_files
from kvtuner.exported_configs.profile.field_types import MAX_PROFILE_BYTES
from kvtuner.exported_configs.sharing.catalogue import FOLDER
from kvtuner.exported_configs.sharing.hub_client import fetch_file
from kvtuner.exported_configs.sharing.profile_store import all_stored, cache_folder, remembered
from kvtuner.exported_configs.sharing.pull import pull
from kvtuner.exported_configs.sharing.push import plan_upload
from kvtuner.exported_configs.sharing.reference import HubReference

if TYPE_CHECKING:
    from collections.abc import Callable

    from hub_server import LoopbackHub

    from kvtuner.exported_configs.profile.profile import Profile

REPO = "me/tiny-kv4"
MAIN = HubReference(REPO, "main")


def test_a_branch_is_fetched_by_its_commit_checked_and_kept_by_digest(
    hub: LoopbackHub, profile: Profile, data: bytes
) -> None:
    oid = hub.repo(REPO, {"profile.json": data}).refs["main"]
    pulled = pull(MAIN)
    assert pulled.path.read_bytes() == data
    assert pulled.profile == profile
    assert pulled.path.parent.parent == cache_folder() / profile.digest.removeprefix("sha256:")
    assert (pulled.reference.revision, pulled.reference.repo) == (oid, REPO)
    assert pulled.notes == (f"{REPO}@main may change; it is {REPO}@{oid} now: name that to keep it",)
    fetched = hub.requested("GET", "/resolve/")
    assert fetched and all(f"/resolve/{oid}/" in path for path in fetched), "by the commit, never by the branch"


def test_a_commit_that_is_kept_needs_no_request(hub: LoopbackHub, data: bytes) -> None:
    oid = hub.repo(REPO, {"profile.json": data}).refs["main"]
    pull(MAIN)
    hub.requests.clear()
    assert pull(MAIN.at(oid)).notes == ()
    assert [pull(HubReference("Me/Tiny-KV4", oid))] == list(all_stored())
    assert hub.requests == []
    pull(MAIN)
    assert hub.requests, "a branch is looked up every time"
    assert not hub.requested("GET", "/resolve/"), "but not fetched again"


def test_another_repository_with_the_same_layers_is_another_profile(
    hub: LoopbackHub, profile: Profile, data: bytes
) -> None:
    """What a digest does not cover, such as the model's identity, comes from where it was asked for."""
    good = hub.repo("good/x", {"profile.json": data}).refs["main"]
    forged = data.replace(b'"id": "owner/tiny-3.1"', b'"id": "evil/model-3.1"')
    assert forged != data
    hub.repo("evil/x", {"profile.json": forged})
    assert pull(HubReference("evil/x", "main")).profile.digest == profile.digest
    pinned = HubReference("good/x", good, digest=profile.digest)
    assert pull(pinned).profile.model.id == "owner/tiny-3.1"
    assert pull(HubReference("evil/x", "main", digest=profile.digest)).profile.model.id == "evil/model-3.1"


def test_a_signature_that_came_later_is_fetched_with_its_commit(
    hub: LoopbackHub, profile: Profile, data: bytes, signature: bytes
) -> None:
    repo = hub.repo(REPO, {"profile.json": data})
    reference = HubReference(REPO, "main", digest=profile.digest)
    assert not pull(reference).path.with_name("profile.json.sig").exists()
    repo.commit({"profile.json": data, "profile.json.sig": signature})
    assert pull(reference).path.with_name("profile.json.sig").read_bytes() == signature


@pytest.mark.parametrize("damage", ["bits", "cut", "empty", "model", "signature", "more", "folder", "device"])
def test_whatever_was_changed_in_the_store_is_fetched_again(
    hub: LoopbackHub, data: bytes, signature: bytes, damage: str
) -> None:
    oid = hub.repo(REPO, {"profile.json": data, "profile.json.sig": signature}).refs["main"]
    path = pull(MAIN).path
    beside = path.with_name("profile.json.sig")
    if damage == "signature":
        beside.unlink()
    elif damage == "more":
        beside.write_bytes(signature + b" ")
    elif damage == "folder":
        path.unlink()
        path.mkdir()
        path.with_name("leftover").write_text("")
    elif damage == "device":
        path.unlink()
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(
            {
                "bits": data.replace(b'"bits": 4', b'"bits": 8', 1),
                "cut": data[: len(data) // 2],
                "empty": b"",
                "model": data.replace(b"owner/tiny-3.1", b"evil/model-3.1"),
            }[damage]
        )
    assert pull(MAIN.at(oid)).path.read_bytes() == data
    assert beside.read_bytes() == signature
    assert sorted(file.name for file in path.parent.iterdir()) == ["origin.json", path.name, beside.name]


def test_a_name_as_long_as_a_file_system_allows_is_kept(hub: LoopbackHub, data: bytes) -> None:
    name = "p" * 250 + ".json"
    hub.repo(REPO, {name: data})
    assert pull(HubReference(REPO, "main", name)).path.name == name


def test_a_named_cache_needs_no_home(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    named = cache_folder()
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == named


def test_a_digest_that_is_pinned_must_be_the_one_that_comes(hub: LoopbackHub, data: bytes) -> None:
    hub.repo(REPO, {"profile.json": data})
    other = "sha256:" + "0" * 64
    with pytest.raises(ProfileError, match=f"but {other} was asked for"):
        pull(HubReference(REPO, "main", digest=other))
    assert list(all_stored()) == []


def test_a_branch_that_moved_is_said_with_the_commit_that_it_was(hub: LoopbackHub, versions: list[bytes]) -> None:
    repo = hub.repo(REPO, {})
    before = None
    for version in versions:
        commit = repo.commit({"profile.json": version})
        notes = pull(MAIN).notes
        assert notes[0].startswith(f"{REPO}@main may change; it is {REPO}@{commit} now")
        assert list(notes[1:]) == ([f"{REPO}@main moved: it was {before} when it was pulled last"] if before else [])
        before = commit
    assert pull(MAIN).notes[1:] == ()
    assert len(list(all_stored())) == len(versions), "older ones are still there"


def test_evaluations_and_a_signature_come_with_the_profile(
    hub: LoopbackHub, profile: Profile, data: bytes, signature: bytes
) -> None:
    beside = {
        "profile.evaluation-x-1.json": evaluation_of(profile.digest),
        "profile.json.sig": signature,
        "profile-8bit.json": data,
        "profile.evaluation-x/../../evil.json": b"{}",
        "other.evaluation-y.json": b"{}",
        "model.safetensors": b"w" * 100,
    }
    hub.repo(REPO, {"profile.json": data, **beside})
    kept = pull(MAIN).path
    assert sorted(file.name for file in kept.parent.iterdir()) == [
        "origin.json",
        "profile.evaluation-x-1.json",
        "profile.json",
        "profile.json.sig",
    ]
    assert [file.name for file in evaluation_files(kept)] == ["profile.evaluation-x-1.json"]
    assert not hub.requested("GET", "safetensors|8bit|other|evil")


def test_what_is_damaged_beside_a_profile_is_left_out_and_said(hub: LoopbackHub, data: bytes) -> None:
    other = evaluation_of("sha256:" + "0" * 64)
    beside = {"profile.evaluation-x.json": other, "profile.evaluation-y.json": b"{}", "profile.json.sig": b"junk"}
    hub.repo(REPO, {"profile.json": data, **beside})
    pulled = pull(MAIN)
    assert sorted(file.name for file in pulled.path.parent.iterdir()) == ["origin.json", "profile.json"]
    left_out = [note for note in pulled.notes if note.startswith("left out ")]
    assert len(left_out) == 3 and any("evaluates another profile" in note for note in left_out)


def test_a_profile_by_its_path_keeps_its_name(hub: LoopbackHub, data: bytes, signature: bytes) -> None:
    signed = {"kv/profile-4bit.json.sig": signature, "profile-4bit.json.sig": b"other"}
    hub.repo(REPO, {"kv/profile-4bit.json": data, **signed})
    kept = pull(HubReference(REPO, "main", "kv/profile-4bit.json"))
    assert kept.path.name == "profile-4bit.json"
    assert kept.path.with_name("profile-4bit.json.sig").read_bytes() == signature
    with pytest.raises(ProfileError, match="is no name for a profile"):
        pull(HubReference(REPO, "main", "kv/origin.json"))


def test_a_tag_of_a_private_repository_is_fetched_with_the_token(hub: LoopbackHub, data: bytes) -> None:
    repo = hub.repo(REPO, {"profile.json": data}, private=True)
    repo.refs["v1"] = repo.refs["main"]
    assert pull(HubReference(REPO, "v1")).reference.revision == repo.refs["main"]
    assert remembered(HubReference(REPO, "v1")) == repo.refs["main"] and remembered(MAIN) is None
    assert {token for _, _, token in hub.requests} == {f"Bearer {hub.token}"}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "refused token": ({"status": 401, "headers": {"message": "Invalid credentials in Authorization header"}}, "token"),
    "forbidden": ({"status": 403}, "may not do that"),
    "rate limit": ({"status": 429, "headers": {"Retry-After": "77"}}, "rate limit is reached; try again in 77 seconds"),
    "broken hub": ({"status": 500}, "the hub answers 500; try again later"),
    "no hub at all": ({"body": b"<html>a portal</html>"}, "does not answer as a hub does"),
    "an empty answer": ({"body": b"{}"}, "does not answer as a hub does"),
    "no commit at all": ({"body": b'{"id": "a/b"}'}, "the hub does not say which commit it is"),
    "a list": ({"body": b"[]"}, "does not answer as a hub does"),
    "a file without a name": (
        {"body": b'{"id": "a/b", "sha": "' + b"a" * 40 + b'", "siblings": [{}]}'},
        "as a hub does",
    ),
    "no commit": ({"body": b'{"id": "a/b", "sha": "main\\u001b[2J", "siblings": []}'}, "does not say which commit"),
    "deep": ({"body": b"[" * 100_000}, "does not answer as a hub does"),
    "teapot": ({"status": 418}, "the hub answers 418"),
    "slow": ({"wait": 3.0}, "cannot be reached"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_hub_have_words_of_their_own(
    hub: LoopbackHub,
    data: bytes,
    name: str,
    caplog: pytest.LogCaptureFixture,
    impatient: None,
    check_message: Callable[..., None],
) -> None:
    fault, words = FAULTS[name]
    hub.repo(REPO, {"profile.json": data})
    hub.fail("GET", "/api/models/", **fault)
    with caplog.at_level(logging.DEBUG), pytest.raises(HubError, match=re.escape(words)) as refused:
        pull(MAIN)
    check_message(str(refused.value), hub, caplog)
    assert list(all_stored()) == []


def test_what_is_not_there_is_named(
    hub: LoopbackHub, data: bytes, caplog: pytest.LogCaptureFixture, check_message: Callable[..., None]
) -> None:
    oid = hub.repo(REPO, {"profile-4bit.json": data, "profile-8bit.json": data}).refs["main"]
    hub.repo("me/gated", {"profile.json": data}, gated=True)
    for reference, words in (
        (HubReference("me/nothing", "main"), "me/nothing@main: there is no such repository, or it is private"),
        (HubReference(REPO, "v9"), f"{REPO}@v9: the repository has no such revision"),
        (HubReference(REPO, "0" * 40), "has no such revision"),
        (HubReference(REPO, "main"), f"{oid}: the repository has no file profile.json; it has profile-4bit.json, prof"),
        (HubReference("me/gated", "main"), "is gated; accept its terms"),
    ):
        with caplog.at_level(logging.DEBUG), pytest.raises(HubError, match=re.escape(words)) as refused:
            pull(reference)
        check_message(str(refused.value), hub, caplog)


@pytest.mark.parametrize("scheme", ["http", "HTTP"])
@pytest.mark.parametrize("password", ["s3cretpw", "o'Brien", 's3"cret', "Pa/ss!word"])
def test_a_hub_that_is_not_there_is_named_without_its_password(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, scheme: str, password: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"{scheme}://user:{password}@127.0.0.1:1")
    with pytest.raises(HubError, match=r"http://127\.0\.0\.1:1 .*HF_ENDPOINT|HF_ENDPOINT is no address") as refused:
        pull(MAIN)
    assert password not in str(refused.value) and password.split("/")[-1] not in str(refused.value)


def test_without_a_token_a_private_repository_is_asked_for_one(
    hub: LoopbackHub, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo(REPO, {"profile.json": data}, private=True)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match=r"there is no such repository, or it is private; .* or log in"):
        pull(MAIN)
    hub.repos[REPO].private = False
    assert pull(MAIN).path.read_bytes() == data
    assert {token for _, _, token in hub.requests} == {None}


def test_another_commit_than_was_asked_for_is_refused(hub: LoopbackHub, data: bytes) -> None:
    repo = hub.repo(REPO, {"profile.json": data})
    repo.refs["a" * 40] = repo.refs["main"]
    with pytest.raises(HubError, match="answers with another commit"):
        pull(MAIN.at("a" * 40))


def test_a_file_at_another_host_is_fetched_there_without_the_token(hub: LoopbackHub, hubs: Any, data: bytes) -> None:
    with hubs() as store:
        store.repo(REPO, {"profile.json": data})
        hub.repo(REPO, {"profile.json": data})
        hub.elsewhere = store.url.replace("127.0.0.1", "localhost")
        assert pull(MAIN).path.read_bytes() == data
        assert store.requested("GET", "/resolve/")
        assert all(token is None for method, _, token in store.requests if method == "GET")


def test_more_than_was_announced_is_not_taken(hub: LoopbackHub, data: bytes) -> None:
    hub.repo(REPO, {"profile.json": data})
    hub.fail("GET", "/resolve/.*/profile.json", body=b" " * (30 * 2**20))
    with pytest.raises(HubError, match=rf"has {30 * 2**20} bytes or more, above {MAX_PROFILE_BYTES}"):
        pull(MAIN)
    assert list(all_stored()) == []


def test_a_download_that_announces_too_much_ends_before_its_first_byte(
    hub: LoopbackHub, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download by Xet tells its size to the progress bar alone, and goes on whatever the bar raises later."""
    hub.repo(REPO, {"profile.json": data})
    reference = MAIN.at(hub.repos[REPO].refs["main"])

    def xet(*_: object, tqdm_class: Callable[..., Any], **__: object) -> str:
        tqdm_class(total=101)
        raise AssertionError("it was downloaded")

    monkeypatch.setattr(HfApi, "hf_hub_download", xet)
    with pytest.raises(HubError, match="has 101 bytes or more, above 100"):
        fetch_file(reference, 10, 100)


def test_pulls_side_by_side_agree(hub: LoopbackHub, versions: list[bytes]) -> None:
    commits = [hub.repo(f"me/{n}", {"profile.json": version}).refs["main"] for n, version in enumerate(versions)]
    references = [HubReference(f"me/{n}", commit) for n, commit in enumerate(commits)] * 6
    with ThreadPoolExecutor(8) as pool:
        paths = {pulled.path for pulled in pool.map(pull, references)}
    assert len(paths) == len(versions)
    assert sorted(each.path for each in all_stored()) == sorted(paths)
    assert list(cache_folder().rglob("*.partial")) == []


@pytest.mark.parametrize("cut", [0, 1, 700])
def test_a_connection_that_is_cut_for_good_leaves_nothing_usable(
    hub: LoopbackHub, data: bytes, cut: int, impatient: None
) -> None:
    hub.repo(REPO, {"profile.json": data})
    fault = hub.fail("GET", "/resolve/.*/profile.json", cut=cut)
    with pytest.raises(HubError, match=rf"cannot be reached .*received {cut} bytes, expected {len(data)}"):
        pull(MAIN)
    assert list(all_stored()) == [] and not list(cache_folder().rglob("*.json"))
    fault.times = 0
    assert pull(MAIN).path.read_bytes() == data


def test_a_connection_that_is_cut_once_is_resumed(hub: LoopbackHub, data: bytes, impatient: None) -> None:
    hub.repo(REPO, {"profile.json": data})
    hub.fail("GET", "/resolve/.*/profile.json", cut=500, times=1)
    assert pull(MAIN).path.read_bytes() == data


@pytest.mark.parametrize("kind", ["truncated", "edited", "text", "newer"])
def test_content_that_is_no_valid_profile_is_refused_and_not_kept(hub: LoopbackHub, data: bytes, kind: str) -> None:
    wrong = {
        "truncated": data[:-200],
        "edited": data.replace(b'"bits": 4', b'"bits": 8', 1),
        "text": b"version https://git-lfs.github.com/spec/v1\n",
        "newer": data.replace(b'"schema_version": 1', b'"schema_version": 3'),
    }[kind]
    assert wrong != data
    oid = hub.repo(REPO, {"profile.json": wrong}).refs["main"]
    with pytest.raises(ProfileError, match=f"{REPO}@{oid} holds no valid profile"):
        pull(MAIN)
    assert list(all_stored()) == []


def test_a_file_too_large_for_a_profile_is_not_fetched(hub: LoopbackHub) -> None:
    hub.repo(REPO, {"profile.json": b" " * (8 * 2**20 + 1)})
    with pytest.raises(HubError, match="has 8388609 bytes, above 8388608"):
        pull(MAIN)
    assert not hub.requested("GET", "/resolve/")


def test_offline_gives_what_was_pulled_last_and_refuses_the_rest(
    hub: LoopbackHub, data: bytes, versions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = hub.repo(REPO, {"profile.json": data})
    for version in versions:
        repo.commit({"profile.json": version})
        pull(MAIN)
    oid = repo.commit({"profile.json": data})
    repo.refs["v1"] = oid
    pull(MAIN)
    pull(HubReference(REPO, "v1"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    (note,) = pull(MAIN).notes
    assert note == f"HF_HUB_OFFLINE: {REPO}@main as it was when it was pulled last, {oid}"
    assert pull(MAIN.at(oid)).notes == ()
    with pytest.raises(HubError, match="me/other@main: HF_HUB_OFFLINE is set and it was never pulled; pull it once"):
        pull(HubReference("me/other", "main"))
    with pytest.raises(HubError, match="never pulled"):
        pull(HubReference(REPO, "v2"))
    with pytest.raises(HubError, match="a push needs the hub"):
        plan_upload(REPO, {})
    assert hub.requests == []


@pytest.mark.parametrize("obstacle", ["the folder", "the lock", "the refs", "a digest"])
def test_a_cache_that_cannot_be_written_is_named(
    hub: LoopbackHub, profile: Profile, data: bytes, obstacle: str
) -> None:
    hub.repo(REPO, {"profile.json": data})
    cache = cache_folder()
    if obstacle == "the folder":
        cache.write_text("")
    elif obstacle == "the lock":
        (cache / "lock").mkdir(parents=True)
    elif obstacle == "a digest":
        cache.mkdir()
        (cache / profile.digest.removeprefix("sha256:")).write_text("")
    else:
        cache.mkdir()
        (cache / "refs").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write in .*kept: .*; set KVTUNER_CACHE to another folder"):
        pull(MAIN)


def test_a_folder_of_the_store_that_is_not_whole_is_none(hub: LoopbackHub, data: bytes) -> None:
    hub.repo(REPO, {"profile.json": data})
    kept = pull(MAIN)
    record = kept.path.with_name("origin.json")
    origin = record.read_text()
    for damage in (
        "{}",
        "[]",
        '{"repo": "x"}',
        origin.replace(REPO, "me/other"),
        origin.replace("profile.json", "x.json"),
    ):
        record.write_text(damage)
        assert list(all_stored()) == [], damage
    assert pull(MAIN) == kept and record.read_text() == origin
    (kept.path.parents[2] / "notes").mkdir()
    assert [fetched.path for fetched in all_stored()] == [kept.path]


def evaluation_of(digest: str) -> bytes:
    committed = next(FOLDER.glob("demo-3bit.evaluation-*.json")).read_bytes()
    return json.dumps({**json.loads(committed), "profile_digest": digest}).encode()
