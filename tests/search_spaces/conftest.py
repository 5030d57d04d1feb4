"""Sensitivity tables without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kvtuner.calibration.sensitivity import Candidate, CandidateScores, LayerConstants, SensitivityTable
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import SEARCHED_BITS, SIDES
from kvtuner.transforms import candidate_transforms

if TYPE_CHECKING:
    from collections.abc import Callable

TRANSFORMS = {"k": candidate_transforms("k"), "v": candidate_transforms("v")}
GEOMETRY = {"num_attention_heads": 8, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64}


def build_table(num_layers: int, score: Callable[[Candidate], CandidateScores], **geometry: Any) -> SensitivityTable:
    """A table that holds what `score` says of each candidate; `geometry` overrides the default."""
    shape = ModelGeometry(**(GEOMETRY | geometry | {"num_layers": num_layers}))
    ones = torch.ones(shape.num_kv_heads, shape.head_dim, dtype=torch.float16)
    candidates = [
        Candidate(layer, side, bits, name)
        for layer in range(num_layers)
        for side in SIDES
        for bits in SEARCHED_BITS
        for name in TRANSFORMS[side]
    ]
    return SensitivityTable(
        identity={"model": "synthetic"},
        geometry=shape,
        constants=dict.fromkeys(range(num_layers), LayerConstants(ones, ones, ones)),
        scores={candidate: score(candidate) for candidate in candidates},
    )


@pytest.fixture(scope="session")
def make_table() -> Callable[..., SensitivityTable]:
    """`make_table(num_layers, score, **geometry)`."""
    return build_table


@pytest.fixture(scope="session")
def random_table() -> Callable[..., SensitivityTable]:
    """`random_table(num_layers, seed, **geometry)`: independent scores, so that anything may dominate anything."""

    def build(num_layers: int, seed: int, **geometry: Any) -> SensitivityTable:
        rng = np.random.default_rng(seed)
        return build_table(num_layers, lambda _: CandidateScores(*rng.uniform(0, 1, size=5).tolist()), **geometry)

    return build
