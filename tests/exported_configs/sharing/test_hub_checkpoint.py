"""A checkpoint on the hub is counted by its index alone, at the revision that was asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvtuner.errors import HubError
from kvtuner.exported_configs.sharing.hub_checkpoint import hub_checkpoint_bytes

if TYPE_CHECKING:
    from hub_server import LoopbackHub

INDEX = "model.safetensors.index.json"


def index_of(total: int) -> bytes:
    return json.dumps({"metadata": {"total_size": total}, "weight_map": {"a": "a.safetensors"}}).encode()


def test_the_index_is_read_and_no_file_of_weights(hub: LoopbackHub) -> None:
    repo = hub.repo("me/model", {INDEX: index_of(14_000), "a.safetensors": b"0" * 200})
    first = repo.refs["main"]
    repo.commit({INDEX: index_of(28_000)})
    assert hub_checkpoint_bytes("me/model", None) == 28_000
    assert hub_checkpoint_bytes("me/model", first) == 14_000
    assert not hub.requested("GET", r"a\.safetensors")


def test_one_file_counts_by_its_size(hub: LoopbackHub) -> None:
    hub.repo("me/model", {"model.safetensors": b"0" * 200})
    assert hub_checkpoint_bytes("me/model", None) == 200
    assert not hub.requested("GET", "resolve")


def test_other_weights_are_not_counted(hub: LoopbackHub) -> None:
    hub.repo("me/model", {"pytorch_model.bin": b"0" * 200, "adapter_model.safetensors": b"0" * 200})
    assert hub_checkpoint_bytes("me/model", None) is None


@pytest.mark.parametrize("text", [b"<html>", b"\xff\xfe\xff", b"[" * 100_000])
def test_an_index_that_is_none_is_refused(hub: LoopbackHub, text: bytes) -> None:
    hub.repo("me/model", {INDEX: text})
    with pytest.raises(HubError, match=r"me/model@[0-9a-f]{40}:model\.safetensors\.index\.json is no index"):
        hub_checkpoint_bytes("me/model", None)


def test_a_repository_or_revision_that_is_not_there_is_refused(hub: LoopbackHub) -> None:
    hub.repo("me/model", {INDEX: index_of(14_000)})
    with pytest.raises(HubError, match="no such revision"):
        hub_checkpoint_bytes("me/model", "v9")
    with pytest.raises(HubError, match="no such repository"):
        hub_checkpoint_bytes("me/other", None)
