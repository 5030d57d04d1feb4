"""Tokens that fit are the memory that SGLang leaves, divided by the byte formula of the tuner's own report."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization

if TYPE_CHECKING:
    from fixture_types import ModelFolder, ProfileOf, SaveProfile, Serve
    from sglang_server import Place


@pytest.mark.parametrize(("page_size", "read_from"), [(1, "flag"), (64, "configuration file")])
def test_tokens_are_the_available_bytes_divided_by_the_formula(
    page_size: int,
    read_from: str,
    serve: Serve,
    here: Place,
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    save_profile: SaveProfile,
    tmp_path: Path,
) -> None:
    folder = model_folder("llama-gqa", num_hidden_layers=4)
    profile = profile_of(AutoConfig.from_pretrained(folder), [LayerQuantization(4, 4)] * 4)
    path = save_profile(profile)
    # SGLang takes the profiled number where the cap is above it.
    flags = ("--max-total-tokens", "100000000", "--mem-fraction-static", "0.1", "--page-size", str(page_size))
    if read_from == "flag":
        options, place = ("--kvtuner-profile", str(path)), here
    else:
        file = tmp_path / "server.yaml"
        file.write_text(f"kvtuner-profile: {path}\nkvtuner-attend: cache\n")
        options = ("--config", str(file))
        place = replace(here, launcher=(sys.executable, str(Path(sys.executable).with_name("sglang")), "serve"))
    with serve(folder, *options, *flags, places=[place]) as server:
        log = server.log
    assert f"attend {'fresh' if read_from == 'flag' else 'cache'}," in log
    figures = re.search(r"([\d,]+) bytes are available for the KV cache: ([\d,]+) tokens", log)
    assert figures is not None
    available, tokens = (int(group.replace(",", "")) for group in figures.groups())
    assert tokens == available // profile.bytes_per_token() // page_size * page_size
    assert f"max_total_num_tokens={tokens}," in log
    assert tokens > 100_000
