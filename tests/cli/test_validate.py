"""``kvtuner validate --model`` checks a profile against the context that it was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.calibration.model import ModelSource, read_config
from kvtuner.exported_configs.build import LayerChoice, dump_profile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtuner.exported_configs.profile import Profile


@pytest.mark.parametrize(("context_length", "is_valid"), [(64, True), (65, False)])
def test_a_windowed_model_is_checked_against_the_context_of_the_profile(
    context_length: int,
    is_valid: bool,
    run: Any,
    model_folder: Callable[..., Path],
    profile_of: Callable[..., Profile],
    tmp_path: Path,
) -> None:
    model = model_folder("mistral-no-window", sliding_window=64)
    config = read_config(ModelSource(str(model)))
    made = profile_of(config, [LayerChoice(4, 4)] * config.num_hidden_layers, last_position=context_length - 1)
    profile = tmp_path / "profile.json"
    profile.write_bytes(dump_profile(made))
    status, out, err = run("validate", profile, "--model", model)
    if is_valid:
        assert status == 0, err
        assert "valid, sha256:" in out
    else:
        assert status == 2
        assert "a window of 64 tokens, shorter than the context of 65" in err
