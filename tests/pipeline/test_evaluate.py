"""An evaluation of a profile that is not the user's own: its copy is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import kvtuner
from kvtuner.calibration.model_loading import ModelSource, read_shape
from kvtuner.exported_configs.profile.build import (
    AskedBudget,
    LayerQuantization,
    build_profile,
    dump_constants,
    dump_profile,
    place_constants,
)
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.quant import Transform
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import ModelFolder
    from hub_server import LoopbackHub

    from kvtuner.exported_configs.profile.profile import Profile

pytestmark = pytest.mark.slow


@pytest.fixture
def placed(model_folder: ModelFolder) -> Profile:
    """A profile of a tiny model whose keys are centered by constants in a side file."""
    source = ModelSource(str(model_folder("llama-gqa")))
    shape = read_shape(source)
    geometry = shape.geometry
    mu = torch.linspace(-1, 1, geometry.num_kv_heads * geometry.head_dim).reshape(geometry.num_kv_heads, -1)
    centered = LayerQuantization(4, 4, Transform(TransformKind.parse("centered"), mu.to(torch.float16)))
    profile = build_profile(
        geometry=geometry,
        layers=[centered] * geometry.num_layers,
        symmetric=False,
        model=shape.identity(source, "float32"),
        budget=AskedBudget("4bit"),
    )
    return place_constants(profile, "file")


def test_copy_of_a_profile_of_the_hub_has_its_side_file(
    hub: LoopbackHub, placed: Profile, model_folder: ModelFolder, corpus_file: Path, tmp_path: Path
) -> None:
    side_file = dump_constants(placed)
    assert side_file is not None
    repo = hub.repo("me/centered", {"profile.json": dump_profile(placed), "profile.constants.safetensors": side_file})
    found = kvtuner.evaluate(
        f"me/centered@{repo.refs['main']}",
        model=model_folder("llama-gqa"),
        data=corpus_file,
        sequence_length=64,
        sequences=(2, 2, 3),
        levels="arithmetic",
        problems=2,
        against="K8V8",
        out=tmp_path / "out",
    )
    assert found.profile_file.parent == tmp_path / "out" and load_profile(found.profile_file) == placed
