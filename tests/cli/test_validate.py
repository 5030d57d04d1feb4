"""``kvtuner validate --model`` checks a profile against the context that it was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.calibration.model import ModelSource, read_config
from kvtuner.exported_configs.build import AskedBudget, LayerChoice, build_profile, dump_profile
from kvtuner.exported_configs.evidence import (
    CalibrationRecord,
    Libraries,
    ModelIdentity,
    Provenance,
    SplitCounts,
    SplitHashes,
)
from kvtuner.geometry import ModelGeometry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HASH = "sha256:" + 64 * "0"


def save_profile(model: Path, path: Path, *, context_length: int) -> Path:
    geometry = ModelGeometry.from_config(read_config(ModelSource(str(model))))
    calibration = CalibrationRecord(
        corpus="none",
        token_ids_sha256=SplitHashes(calibrate=HASH, select=HASH, report=HASH),
        num_sequences=SplitCounts(calibrate=1, select=1, report=1),
        sequence_length=8,
        position_range=(0, context_length - 1),
        seed=0,
        score="kl",
    )
    profile = build_profile(
        geometry=geometry,
        layers=[LayerChoice(4, 4)] * geometry.num_layers,
        k_group_size=geometry.head_dim,
        v_group_size=geometry.v_head_dim,
        symmetric=False,
        model=ModelIdentity(id="tiny", revision=None, config_sha256=HASH, architecture="Tiny", dtype="bfloat16"),
        budget=AskedBudget("by hand"),
        quality=None,
        provenance=Provenance(
            kvtuner_version="0",
            calibration=calibration,
            search=None,
            libraries=Libraries(torch="0", transformers="0", optuna="0"),
        ),
    )
    path.write_bytes(dump_profile(profile))
    return path


@pytest.mark.parametrize(("context_length", "is_valid"), [(64, True), (65, False)])
def test_a_windowed_model_is_checked_against_the_context_of_the_profile(
    context_length: int, is_valid: bool, run: Any, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = model_folder("mistral-no-window", sliding_window=64)
    profile = save_profile(model, tmp_path / "profile.json", context_length=context_length)
    status, out, err = run("validate", profile, "--model", model)
    if is_valid:
        assert status == 0, err
        assert "valid, sha256:" in out
    else:
        assert status == 2
        assert "a window of 64 tokens, shorter than the context of 65" in err
