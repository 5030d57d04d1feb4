"""The plugin inside SGLang's own functions, without a server: each check in a fresh process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization

if TYPE_CHECKING:
    from fixture_types import ModelFolder, ProfileOf, RunProgram, SaveProfile

PROGRAM = Path(__file__).parent / "programs" / "plugin_program.py"
CHECKS = re.findall(r"^def (check_\w+)\(", PROGRAM.read_text(), re.MULTILINE)


@pytest.mark.parametrize("check", CHECKS)
def test_in_sglang(
    check: str, model_folder: ModelFolder, profile_of: ProfileOf, save_profile: SaveProfile, run_program: RunProgram
) -> None:
    folder = model_folder("llama-gqa")
    path = save_profile(profile_of(AutoConfig.from_pretrained(folder), [LayerQuantization(4, 4)] * 3))
    done = run_program(str(PROGRAM), check, str(path), str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
