"""A storm of mutated profiles: no crash, no hang, no memory, and nothing accepted that the format forbids."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.document import DocumentKind, read_document
from kvtuner.exported_configs.profile.load import PROFILE, load_profile
from kvtuner.exported_configs.profile.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SLOWEST_S = 2.0


def run_storm(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run a process of its own, with 512 MiB above what it has mapped before the first profile."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(HERE / "load_storm.py"), str(count), str(seed), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def check(report: dict[str, Any]) -> None:
    assert report["faults"] == []
    assert report["slowest_s"] < SLOWEST_S, report["slowest"]
    outcomes = report["outcomes"]
    assert sum(outcomes.values()) == report["count"]
    for kind in ("bytes", "values", "likely values", "likely values, resealed and restated"):
        for outcome in ("accepted", "refused"):
            assert outcomes[f"{kind}: {outcome}"] > report["count"] / 1000, f"{kind} are hardly ever {outcome}"
    assert len(report["reasons"]) >= 40, "the mutations reach few rules"


@pytest.mark.slow
def test_storm_of_5000(tmp_path: Path) -> None:
    check(run_storm(5_000, 1, tmp_path))


@pytest.mark.full
def test_storm_of_100000(tmp_path: Path) -> None:
    check(run_storm(100_000, 2, tmp_path))


@pytest.fixture(scope="module")
def storm() -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("load_storm", HERE / "load_storm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)  # as for a program that is run: it imports its neighbours
        spec.loader.exec_module(module)
    run: Callable[..., Any] = module.storm
    return run


def lax_numbers(source: Any) -> Profile:
    """Takes 4.0 and true for integers."""
    return Profile.model_validate(read_document(source, PROFILE), strict=False)


def last_field_wins(source: Any) -> Profile:
    """Takes the second of two fields of one name."""
    data = source if isinstance(source, bytes) else source.read_bytes()
    try:
        return load_profile(json.dumps(json.loads(data)).encode())
    except ValueError as error:
        raise ProfileError(f"must be JSON ({type(error).__name__}); fetch it again") from error


def crashes(source: Any) -> Profile:
    """Lets an error of its own parts through."""
    return load_profile(json.dumps(json.loads(source if isinstance(source, bytes) else source.read_bytes())).encode())


def blind_to_the_digest(source: Any) -> Profile:
    """Takes what the layers give for the digest."""
    from kvtuner.exported_configs.profile import profile

    real, profile._check_digest = profile._check_digest, lambda _: None
    try:
        return load_profile(source)
    finally:
        profile._check_digest = real


def other_than_written(source: Any) -> Profile:
    """Reads another model's name."""
    profile = load_profile(source)
    return profile.model_copy(update={"model": profile.model.model_copy(update={"id": "other"})})


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lax_numbers, "Error"),
        (last_field_wins, "stands twice"),
        (crashes, "Error"),
        (blind_to_the_digest, "another reader refuses it: AssertionError('digest')"),
        (other_than_written, "it is not what was written"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_storm_finds_the_faults_of_a_broken_loader(
    storm: Callable[..., Any], tmp_path: Path, broken: Callable[[Any], Profile], words: str
) -> None:
    faults = storm(broken, 900, 3, tmp_path)["faults"]
    assert any(words in fault["fault"] for fault in faults), faults


def test_same_storm_finds_none_in_ours(storm: Callable[..., Any], tmp_path: Path) -> None:
    assert storm(load_profile, 900, 3, tmp_path)["faults"] == []


def test_kind_of_document_decides_what_its_fields_are_called() -> None:
    """Signatures have other names than profiles, and every other limit alike."""
    import re

    signature = DocumentKind("signature", "sign again", 2**20, re.compile("[a-zA-Z]+"))
    assert read_document(b'{"mediaType": 1}', signature) == {"mediaType": 1}
    with pytest.raises(ProfileError, match="unknown field 'mediaType'"):
        read_document(b'{"mediaType": 1}', PROFILE)
