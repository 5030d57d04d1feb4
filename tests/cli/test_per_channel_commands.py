"""Profiles with keys per channel are shown and compared; checking one against a model says that no server reads it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvtuner.calibration.model_loading import ModelSource, read_config
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.exported_configs.profile.build import dump_profile, uniform_profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair, ScaleLayout

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import RunCommand


@pytest.fixture
def two_files(tmp_path: Path) -> tuple[Path, Path]:
    """K4V2 of the demo model, with keys per token and per channel."""
    config = read_config(ModelSource("demo"))
    geometry = ModelGeometry.from_config(config)
    model = identity_of(config, id="demo", revision=None, dtype="float32")
    files = tmp_path / "token.json", tmp_path / "channel.json"
    for file, k_granularity, group in zip(files, ("per_token", "per_channel"), (None, 32), strict=True):
        profile = uniform_profile(
            geometry, PrecisionPair(4, 2), model, k_layout=ScaleLayout(group, granularity=k_granularity)
        )
        file.write_bytes(dump_profile(profile))
    return files


def test_show_says_which_keys_are_per_channel(run: RunCommand, two_files: tuple[Path, Path]) -> None:
    token, channel = (run("show", file)[1] for file in two_files)
    assert "per channel, 32 tokens per scale" in channel
    assert "per channel" not in token
    facts = json.loads(run("show", two_files[1], "--json")[1])
    assert facts["k_granularity"] == "per_channel"


def test_diff_says_that_granularity_changed(run: RunCommand, two_files: tuple[Path, Path]) -> None:
    status, out, _ = run("diff", *two_files, "--exit-code")
    assert status == 1
    (line,) = (line for line in out.splitlines() if "granularity" in line and "_" in line)
    assert line.split() == ["k.granularity", "per_token", "per_channel", "*"]
    facts = json.loads(run("diff", *two_files, "--json")[1])
    assert facts["k_granularity"] == ["per_token", "per_channel"] and facts["defaults_differ"]
    assert json.loads(run("diff", two_files[1], two_files[1], "--json")[1])["same_digest"]


def test_validate_accepts_the_file_and_refuses_to_serve_it(run: RunCommand, two_files: tuple[Path, Path]) -> None:
    assert run("validate", *two_files)[0] == 0
    assert run("validate", two_files[0], "--model", "demo")[0] == 0
    status, _, err = run("validate", two_files[1], "--model", "demo")
    assert status == 2 and "tail pages" in err
