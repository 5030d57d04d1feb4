"""The host pool and its storages alone, on the second of two ranks and a middle stage: bytes, pages, faults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization

if TYPE_CHECKING:
    from fixture_types import MixedLayers, ModelFolder, ProfileOf, RunProgram, SaveProfile

    from kvtuner.precision import WordBits


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_host_pool_of_one_rank_keeps_pages_and_believes_no_others(
    page_size: int,
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    mixed_layers: MixedLayers,
    save_profile: SaveProfile,
    run_program: RunProgram,
    tmp_path: Path,
) -> None:
    config = AutoConfig.from_pretrained(model_folder("llama-gqa", num_hidden_layers=5))
    choices = mixed_layers(config)
    choices[3] = LayerQuantization(16, 2)
    words: tuple[WordBits, WordBits] = (32, 32) if page_size == 1 else (16, 16)
    path, other = (
        save_profile(profile_of(config, each, words=words, half_groups=True))
        for each in (choices, [LayerQuantization(8, 8), *choices[1:]])
    )
    program = Path(__file__).with_name("hicache_program.py")
    done = run_program(str(program), str(path), str(tmp_path), str(page_size), str(other))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "done"


def test_a_large_pool_is_registered_in_pieces_of_whole_records_and_pages(run_program: RunProgram) -> None:
    done = run_program(str(Path(__file__).with_name("registration_program.py")))
    assert done.returncode == 0, done.stderr[-3000:]
