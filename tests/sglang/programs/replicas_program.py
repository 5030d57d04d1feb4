"""Run by features/test_replicas.py: what a launcher says of replicas that do not all serve what it checked."""

from __future__ import annotations

from typing import Any

from kvtuner.runtime_loader.sglang.activation import _compare_digests, _of_replicas
from kvtuner.runtime_loader.sglang.loaded_request import LoadedRequest
from kvtuner.runtime_loader.sglang.process_state import PROFILE_KEY, READS_KEY, WINDOW_KEY, process_state
from kvtuner.runtime_loader.sglang.request import ServingRequest

GOOD = {PROFILE_KEY: "sha256:1", READS_KEY: "fresh", WINDOW_KEY: {}, "startup_time": 3}


def ending(*schedulers: dict[str, Any]) -> str:
    """What ends the launcher where a controller speaks for these schedulers; nothing where it serves."""
    try:
        _compare_digests([{"status": "ready", **_of_replicas(list(schedulers))}])
    except SystemExit as end:
        return str(end)
    return ""


state = process_state()
state.loaded_request = LoadedRequest(ServingRequest("p", from_launcher=True), None)
state.checked_digest = GOOD[PROFILE_KEY]
assert ending(GOOD) == ending(GOOD, GOOD) == ""
other = {**GOOD, PROFILE_KEY: "sha256:2"}
assert ending(GOOD, other) == ending(other, GOOD)
assert "scheduler 0 serves sha256:1, sha256:2, but the launcher checked sha256:1" in ending(GOOD, other)
assert "serves sha256:2, but the launcher checked sha256:1" in ending(other, other)
for schedulers in ((), ({},), (GOOD, {"startup_time": 1}), ({}, GOOD)):
    assert "does not serve the profile: its process did not load SGLang's plugin" in ending(*schedulers), schedulers
