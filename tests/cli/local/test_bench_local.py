"""``kvtuner bench --local``: transformers' generate, the unquantized engine, the profile and KIVI's in one report."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kvtuner.exported_configs.profile.build import LayerQuantization, dump_profile

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import LoadTiny, ModelFolder, ProfileOf, RunCommand


@pytest.mark.slow
def test_all_are_measured_once_and_reported(
    run: RunCommand, model_folder: ModelFolder, load_tiny: LoadTiny, profile_of: ProfileOf, corpus_file: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    profile = profile_of(load_tiny("llama-gqa").model.config, [LayerQuantization(4, 2)] * 3)
    file = tmp_path / "profile.json"
    file.write_bytes(dump_profile(profile))
    flags = (
        "--local", "--model", model_folder("llama-gqa"), "--device", "cpu", "--data", corpus_file, "--sequence-length",
        "64", "--sequences", "2,2,3", "--lengths", "10,100", "--outputs", "4", "--concurrency", "1,3", "--batches", "2",
        "--rounds", "1", "--repeats", "2", "--prompt-tokens", "32", "--output-tokens", "4",
        "--memory-bandwidth", "1000000", "--against", "K4V4-per-channel", "--out", tmp_path / "bench",
    )  # fmt: skip
    status, out, err = run("bench", file, *flags, "--json")
    assert status == 0, err
    result = json.loads(out)
    generate, _, packed, _ = result["ways"]
    assert [row["name"] for row in result["ways"]] == ["transformers", "bf16", "profile", "K4V4-per-channel"]
    assert packed["server"]["digest"] == profile.digest
    assert packed["server"]["tokens_that_fit"] is not None
    assert generate["server"]["tokens_that_fit"] is None
    for row in result["ways"]:
        assert {load["kind"] for load in row["loads"]} == {"prompt", "output", "concurrency", "batch", "stability"}
        assert all(load["success_rate"] == 1 for load in row["loads"])
        assert row["left_out"] == []
    assert (tmp_path / "bench" / "bench.html").is_file()
    status, out, err = run("bench", file, *flags)
    assert err.count("was measured before") == 4
    assert "transformers" in out
