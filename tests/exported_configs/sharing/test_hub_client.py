"""The client of the hub: faults of the library are the hub's, faults of this code are not called so."""

from __future__ import annotations

import errno
import tempfile
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import HfApi

from kvtuner.errors import HubError
from kvtuner.exported_configs.sharing import hub_client
from kvtuner.exported_configs.sharing.hub_client import fetch_file, list_files
from kvtuner.exported_configs.sharing.reference import HubReference

if TYPE_CHECKING:
    from pathlib import Path

    from hub_server import LoopbackHub

REPO = "me/tiny-kv4"


def test_mistake_in_reading_what_the_library_answered_is_not_called_the_hubs(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = SimpleNamespace(sha="a" * 40, private=False, siblings=[SimpleNamespace(name="profile.json")])
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: info)
    with pytest.raises(AttributeError, match="rfilename"):
        list_files(REPO, None)


def test_mistake_after_a_download_is_not_called_the_hubs(
    hub: LoopbackHub, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = HubReference(REPO, hub.repo(REPO, {"profile.json": data}).refs["main"])

    def mistaken(path: Path, most: int) -> bytes:
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(hub_client, "first_bytes", mistaken)
    with pytest.raises(TypeError, match="a mistake of ours"):
        fetch_file(reference, len(data), len(data))


def test_answer_that_the_library_trips_over_is_called_the_hubs(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo(REPO)
    hub.fail("GET", "/api/models/", body=b"[]")
    with pytest.raises(HubError, match=f"{hub.url} does not answer as a hub does"):
        list_files(REPO, None)


def test_temporary_folder_without_room_is_named(hub: LoopbackHub, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = HubReference(REPO, hub.repo(REPO, {"profile.json": data}).refs["main"])

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(HubError, match=r"no temporary file can be kept \(No space left on device\); set TMPDIR"):
        fetch_file(reference, len(data), len(data))
