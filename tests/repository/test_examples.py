"""The examples run as their own words say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from kvtuner.calibration.model_loading import ModelSource, read_config
from kvtuner.cli.parser import build_parser, parse
from kvtuner.exported_configs.profile.build import LayerQuantization, dump_profile

if TYPE_CHECKING:
    from fixture_types import ProfileOf

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
def test_text_is_generated_from_packed_rows(profile_of: ProfileOf, tmp_path: Path) -> None:
    profile = profile_of(read_config(ModelSource("demo")), [LayerQuantization(4, 4)] * 9)
    (tmp_path / "profile.json").write_bytes(dump_profile(profile))
    done = subprocess.run(
        [sys.executable, EXAMPLES / "generate.py", "--profile", tmp_path / "profile.json", "--tokens", "8"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def main(")
    assert f"{profile.bytes_per_token():,} per token" in done.stdout


def test_the_configuration_file_names_flags_that_exist() -> None:
    args = parse(build_parser(), ["search", "--config", str(EXAMPLES / "search.yaml"), "--trials", "3"])
    assert args.budget == yaml.safe_load((EXAMPLES / "search.yaml").read_text())["budget"]
    assert (args.model, args.trials) == ("demo", 3)


def test_the_job_of_kubernetes_is_a_search() -> None:
    job = yaml.safe_load((EXAMPLES / "cluster" / "search.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["kvtuner", "search"]
    args = parse(build_parser(), ["search", *container["args"]])
    (mount,) = container["volumeMounts"]
    assert args.budget and str(args.out).startswith(mount["mountPath"])
    assert mount["name"] in [volume["name"] for volume in pod["volumes"]]
    assert job["spec"]["parallelism"] == job["spec"]["completions"] > 1
