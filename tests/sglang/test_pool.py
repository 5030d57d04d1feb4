"""The pool alone, on the second of two ranks and a middle stage: bytes, constants of its heads, moves and copies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow

if TYPE_CHECKING:
    from fixture_types import MixedLayers, ModelFolder, ProfileOf, RunProgram, SaveProfile

    from kvtuner.precision import WordBits


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
    words: tuple[WordBits, WordBits] = (32, 32) if page_size == 1 else (16, 16)
    path = save_profile(profile_of(config, choices, words=words, half_groups=True))
    program = Path(__file__).parent / "programs" / "pool_program.py"
    done = run_program(str(program), str(path), str(page_size))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("window", "arguments"),
    [
        (ExactWindow(6, 2), ("float32", "48", "torch")),
        (ExactWindow(24, 3), ("bfloat16", "12", "torch")),  # more places than the pool has tokens
        pytest.param(ExactWindow(6, 2), ("float32", "48", "triton"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_pool_with_a_window_that_is_not_kept_as_it_says_is_refused_by_its_self_test(
    window: ExactWindow,
    arguments: tuple[str, ...],
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    mixed_layers: MixedLayers,
    save_profile: SaveProfile,
    run_program: RunProgram,
) -> None:
    config = AutoConfig.from_pretrained(model_folder("llama-gqa", num_hidden_layers=5))
    path = save_profile(profile_of(config, mixed_layers(config), window=window))
    program = Path(__file__).parent / "programs" / "window_program.py"
    done = run_program(str(program), str(path), *arguments)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("attend", ["fresh", "cache"])
def test_chunks_reach_flash_attention_with_what_their_rows_hold(
    attend: str,
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    mixed_layers: MixedLayers,
    save_profile: SaveProfile,
    run_program: RunProgram,
) -> None:
    config = AutoConfig.from_pretrained(model_folder("llama-gqa", num_hidden_layers=3))
    path = save_profile(profile_of(config, mixed_layers(config)))
    program = Path(__file__).parent / "programs" / "prefill_program.py"
    done = run_program(str(program), str(path), attend)
    assert done.returncode == 0, done.stderr[-3000:]
