"""Pushing over real HTTP: one commit on top of what was seen, or none; one clear line for every fault."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from kvtuner.errors import HubError
from kvtuner.exported_configs.sharing.pull import pull
from kvtuner.exported_configs.sharing.push import plan_upload, push
from kvtuner.exported_configs.sharing.reference import HubReference

if TYPE_CHECKING:
    from collections.abc import Callable

    from hub_server import LoopbackHub

REPO = "me/tiny-kv4"
MAIN = HubReference(REPO, "main")


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own, of httpx
def test_a_push_makes_one_commit_of_all_files(hub: LoopbackHub, data: bytes) -> None:
    files = {"README.md": b"---\nlicense: mit\n---\n", "profile.json": data, "pictures/a.png": b"\x89PNG" * 9}
    pushed = push(plan_upload(REPO, files, private=True), "first")
    repo = hub.repos[REPO]
    assert repo.private and len(repo.commits) == 2 and repo.refs["main"] == pushed.commit
    assert {name: repo.commits[pushed.commit][name] for name in files} == files
    assert pull(MAIN.at(pushed.commit)).path.read_bytes() == data


def test_a_push_replaces_and_removes_on_top_of_what_was_seen(
    hub: LoopbackHub, data: bytes, versions: list[bytes]
) -> None:
    repo = hub.repo(REPO, {"profile.json": versions[0], "profile.json.sig": b"old", "notes.txt": b"mine"})
    pushed = push(plan_upload(REPO, {"profile.json": data}), "second")
    assert set(repo.commits[pushed.commit]) == {".gitattributes", "profile.json", "notes.txt"}
    assert repo.commits[pushed.commit]["profile.json"] == data


def test_a_branch_that_moved_since_it_was_seen_is_not_written_over(hub: LoopbackHub, data: bytes) -> None:
    repo = hub.repo(REPO, {"notes.txt": b"mine"})
    upload = plan_upload(REPO, {"profile.json": data})
    hub.before_commit = lambda: repo.commit({"notes.txt": b"theirs"})
    with pytest.raises(HubError, match="the branch moved while this was pushed"):
        push(upload, "late")
    assert repo.commits[repo.refs["main"]] == {"notes.txt": b"theirs"}


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_an_upload_that_breaks_commits_nothing(hub: LoopbackHub, data: bytes, impatient: None) -> None:
    repo = hub.repo(REPO, {"notes.txt": b"mine"})
    hub.fail("PUT", "/large/", status=503)
    with pytest.raises(HubError, match="the hub answers 503; try again later"):
        push(plan_upload(REPO, {"profile.json": data, "a.png": b"\x89PNG"}), "x")
    assert repo.commits[repo.refs["main"]].keys() == {".gitattributes", "notes.txt"}


def test_what_a_gitignore_leaves_out_is_named(hub: LoopbackHub, data: bytes) -> None:
    hub.repo(REPO, {"notes.txt": b"mine"})
    hub.ignored = {"profile.json"}
    with pytest.raises(HubError, match=r"lacks profile\.json: does the repository's \.gitignore"):
        push(plan_upload(REPO, {"profile.json": data, "notes.txt": b"new"}), "x")


def test_a_pull_request_leaves_the_branch_alone(hub: LoopbackHub, data: bytes) -> None:
    repo = hub.repo(REPO, {"notes.txt": b"mine"})
    before = repo.refs["main"]
    pushed = push(plan_upload(REPO, {"profile.json": data}, create_pr=True), "please")
    assert repo.refs["main"] == before and "/discussions/1" in pushed.url
    assert pull(MAIN.at(pushed.commit)).path.read_bytes() == data


@pytest.mark.parametrize("may_write", [True, False])
def test_a_token_that_may_not_write_is_named(
    hub: LoopbackHub,
    data: bytes,
    may_write: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    check_message: Callable[..., None],
) -> None:
    hub.may_write = may_write
    if may_write:
        monkeypatch.setenv("HF_TOKEN", "hf_another" + "x" * 20)
    hub.repo("me/public", {"notes.txt": b""})
    with caplog.at_level(logging.DEBUG), pytest.raises(HubError, match="this token") as refused:
        push(plan_upload("me/public", {"profile.json": data}), "x")
    check_message(str(refused.value), hub, caplog)


def test_a_card_that_the_hub_refuses_is_named(hub: LoopbackHub, data: bytes) -> None:
    files = {"profile.json": data, "README.md": b"---\nlicense: my-own\n---\n"}
    with pytest.raises(HubError, match=r"Invalid metadata in README\.md"):
        push(plan_upload(REPO, files), "x")


def test_somebody_who_was_faster_to_make_the_repository_is_named(hub: LoopbackHub, data: bytes) -> None:
    upload = plan_upload(REPO, {"profile.json": data})
    hub.repo(REPO, {"notes.txt": b"theirs"})
    with pytest.raises(HubError, match="somebody made this repository meanwhile"):
        push(upload, "x")


@pytest.mark.parametrize(("is_private", "found"), [(False, "is public"), (None, "may be public")])
def test_a_private_push_to_a_repository_that_all_may_see_is_refused_before_anything_is_sent(
    hub: LoopbackHub, data: bytes, is_private: bool | None, found: str
) -> None:
    hub.repo(REPO, {"notes.txt": b"mine"}, private=is_private)
    for create_pr in (False, True):
        with pytest.raises(HubError, match=f"{REPO} {found}.* --private is for a new repository or one that is"):
            plan_upload(REPO, {"profile.json": data}, private=True, create_pr=create_pr)
    assert not hub.requested("POST", "") and not hub.requested("PUT", "")


def test_a_private_push_to_a_private_repository_goes_on(hub: LoopbackHub, data: bytes) -> None:
    repo = hub.repo(REPO, {"notes.txt": b"mine"}, private=True)
    upload = plan_upload(REPO, {"profile.json": data}, private=True)
    assert upload.is_private and repo.commits[push(upload, "x").commit]["profile.json"] == data


def test_a_hub_that_took_the_flag_need_not_tell_that_it_did(hub: LoopbackHub, data: bytes) -> None:
    hub.tells_visibility = False
    pushed = push(plan_upload(REPO, {"profile.json": data}, private=True), "x")
    assert hub.repos[REPO].commits[pushed.commit]["profile.json"] == data


def test_a_repository_that_the_hub_makes_public_against_the_flag_gets_nothing(hub: LoopbackHub, data: bytes) -> None:
    upload = plan_upload(REPO, {"profile.json": data}, private=True)
    hub.makes_public = True
    with pytest.raises(HubError, match=f"{REPO} is public, and --private is for"):
        push(upload, "x")
    assert not hub.requested("POST", "/commit/")
