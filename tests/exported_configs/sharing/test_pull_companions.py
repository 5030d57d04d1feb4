"""Evaluations and signatures beside a profile that are larger than any, or not given: the profile is pulled or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import HfApi

from kvtuner.errors import HubError
from kvtuner.exported_configs.profile.evaluation_record import EVALUATION
from kvtuner.exported_configs.sharing.profile_store import all_stored
from kvtuner.exported_configs.sharing.pull import pull
from kvtuner.exported_configs.sharing.reference import HubReference

if TYPE_CHECKING:
    from hub_server import LoopbackHub

REPO = "me/tiny-kv4"
MAIN = HubReference(REPO, "main")
NAME = "profile.evaluation-x.json"


def test_evaluation_larger_than_any_is_left_out_and_said(hub: LoopbackHub, data: bytes) -> None:
    hub.repo(REPO, {"profile.json": data, NAME: b" " * (EVALUATION.max_bytes + 1)})
    pulled = pull(MAIN)
    assert sorted(file.name for file in pulled.path.parent.iterdir()) == ["origin.json", "profile.json"]
    assert f"has {EVALUATION.max_bytes + 1} bytes, above {EVALUATION.max_bytes}" in pulled.notes[-1]
    assert not hub.requested("GET", f"/resolve/.*/{NAME}")


def test_evaluation_whose_size_the_hub_does_not_tell_is_left_out_and_said(
    hub: LoopbackHub, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo(REPO, {"profile.json": data, NAME: b"{}"})
    model_info = HfApi.model_info

    def without_its_size(*arguments: Any, **settings: Any) -> Any:
        info = model_info(*arguments, **settings)
        for file in info.siblings or ():
            file.size = None if file.rfilename == NAME else file.size
        return info

    monkeypatch.setattr(HfApi, "model_info", without_its_size)
    assert f"{NAME} may have any size: the hub does not tell it" in pull(MAIN).notes[-1]


def test_evaluation_that_grows_while_it_is_fetched_is_left_out_and_said(hub: LoopbackHub, data: bytes) -> None:
    hub.repo(REPO, {"profile.json": data, NAME: b"{}"})
    hub.fail("GET", f"/resolve/.*/{NAME}", body=b" " * (3 * EVALUATION.max_bytes))
    assert f"bytes or more, above {EVALUATION.max_bytes}" in pull(MAIN).notes[-1]


def test_profile_is_not_kept_without_an_evaluation_that_another_try_would_fetch(
    hub: LoopbackHub, data: bytes, impatient: None
) -> None:
    hub.repo(REPO, {"profile.json": data, NAME: b"{}"})
    hub.fail("GET", f"/resolve/.*/{NAME}", status=503)
    hub.fail("HEAD", f"/resolve/.*/{NAME}", status=503)
    with pytest.raises(HubError, match="the hub answers 503; try again later"):
        pull(MAIN)
    assert list(all_stored()) == []
