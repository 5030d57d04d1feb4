"""The pool alone, on the second of two ranks and a middle stage: bytes, constants of its heads, moves and copies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization

if TYPE_CHECKING:
    from fixture_types import MixedLayers, ModelFolder, ProfileOf, RunProgram, SaveProfile


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_of_one_rank_keeps_moves_and_copies_whole_rows(
    page_size: int,
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    mixed_layers: MixedLayers,
    save_profile: SaveProfile,
    run_program: RunProgram,
) -> None:
    config = AutoConfig.from_pretrained(model_folder("llama-gqa", num_hidden_layers=5))
    choices = mixed_layers(config)
    choices[3] = LayerQuantization(16, 2)
    path = save_profile(profile_of(config, choices))
    program = Path(__file__).parent / "programs" / "pool_program.py"
    done = run_program(str(program), str(path), str(page_size))
    assert done.returncode == 0, done.stderr[-3000:]
