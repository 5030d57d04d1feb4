"""The pool alone, on the second of two ranks and a middle stage: bytes, constants of its heads, moves and copies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import NO_WINDOW, ExactWindow

if TYPE_CHECKING:
    from collections.abc import Callable
    from subprocess import CompletedProcess

    from fixture_types import MixedLayers, MixedProfile, ModelFolder, ProfileOf, RunProgram, SaveProfile

    from kvtuner.precision import WordBits

    RunOnProfile = Callable[..., CompletedProcess[str]]


@pytest.fixture
def run_on_profile(
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    mixed_layers: MixedLayers,
    save_profile: SaveProfile,
    run_program: RunProgram,
) -> RunOnProfile:
    """Run a program with the file of a profile of mixed layers, some of them given, and more arguments."""

    def run(
        name: str,
        *arguments: str,
        num_layers: int = 5,
        given: dict[int, LayerQuantization] | None = None,
        **options: object,
    ) -> CompletedProcess[str]:
        config = AutoConfig.from_pretrained(model_folder("llama-gqa", num_hidden_layers=num_layers))
        choices = mixed_layers(config)
        for layer, choice in (given or {}).items():
            choices[layer] = choice
        path = save_profile(profile_of(config, choices, **options))
        return run_program(str(Path(__file__).parent / "programs" / name), str(path), *arguments)

    return run


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_of_one_rank_keeps_moves_and_copies_whole_rows(page_size: int, run_on_profile: RunOnProfile) -> None:
    words: tuple[WordBits, WordBits] = (32, 32) if page_size == 1 else (16, 16)
    given = {3: LayerQuantization(16, 2)}
    done = run_on_profile("pool_program.py", str(page_size), given=given, words=words, half_groups=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_of_latents_keeps_and_moves_them_with_their_rotary_channels(
    page_size: int, model_folder: ModelFolder, mixed_profile: MixedProfile, save_profile: SaveProfile,
    run_program: RunProgram,
) -> None:  # fmt: skip
    profile = mixed_profile(model_folder("deepseek-v2", num_hidden_layers=5), by_kinds=True)
    program = Path(__file__).parent / "programs" / "latent_pool_program.py"
    done = run_program(str(program), str(save_profile(profile)), str(page_size))
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
    window: ExactWindow, arguments: tuple[str, ...], run_on_profile: RunOnProfile
) -> None:
    done = run_on_profile("window_program.py", *arguments, window=window)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("window", [NO_WINDOW, ExactWindow(3), ExactWindow(1), ExactWindow(3, 2)], ids=str)
@pytest.mark.parametrize("attend", ["fresh", "cache"])
def test_chunks_reach_flash_attention_with_what_their_rows_hold(
    attend: str, window: ExactWindow, run_on_profile: RunOnProfile
) -> None:
    done = run_on_profile("prefill_program.py", attend, num_layers=3, window=window)
    assert done.returncode == 0, done.stderr[-3000:]
