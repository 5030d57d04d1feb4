"""Attention that reads a recipe's cache, against one query at a time in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.recipes.kivi import ChannelGroups, TokenGroups
from benchmarks.recipes.recipe import ExactTokens, StoredLayer, StoredSide
from benchmarks.recipes.simulation import recipe_attention
from kvtuner.calibration.forward.read_plan import AttentionCall

TOKENS, SPLIT = 150, 37  # more rows than are computed at a time
LAYERS: dict[str, StoredLayer] = {
    "none exact": (StoredSide(TokenGroups(2)), StoredSide(TokenGroups(2))),
    "sinks and recent": (
        StoredSide(TokenGroups(2), ExactTokens(sinks=4, recent=9)),
        StoredSide(TokenGroups(2), ExactTokens(sinks=4, recent=9)),
    ),
    "keys otherwise than values": (
        StoredSide(ChannelGroups(2, 8), ExactTokens(tile=16, after_reading=True)),
        StoredSide(TokenGroups(2), ExactTokens(recent=17, after_reading=True)),
    ),
}


def call(first: int = 0) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, TOKENS, 16, generator=generator) for heads in (4, 2, 2))
    return AttentionCall(q[:, :, first:], k, v, 0.25)


def oracle(whole: AttentionCall, layer: StoredLayer) -> Tensor:
    """Attention of every token; those before the split read all exactly."""
    readings = [
        (x.double(), side.quantizer.read_back(x).double(), side.exact)
        for x, side in zip((whole.k, whole.v), layer, strict=True)
    ]
    out = torch.zeros(2, 4, TOKENS, 16, dtype=torch.float64)
    for row in range(TOKENS):
        seen = []
        for x, stored, exact in readings:
            mask = exact.mask(torch.tensor([row]), torch.arange(row + 1))[0] | torch.tensor(row < SPLIT)
            read = torch.where(mask[:, None], x[:, :, : row + 1], stored[:, :, : row + 1])
            seen.append(read.repeat_interleave(2, dim=1))
        k, v = seen
        scores = (whole.q[:, :, row : row + 1].double() * 0.25) @ k.mT
        out[:, :, row : row + 1] = scores.softmax(-1) @ v
    return out


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("first", [0, SPLIT])
def test_every_query_reads_what_is_quantized_by_its_time(name: str, first: int) -> None:
    wanted = oracle(call(), LAYERS[name])[:, :, first:]
    found = recipe_attention([LAYERS[name]], SPLIT)(0, call(first))
    assert (found - wanted).abs().max() < 1e-5  # float32 sums of 150 products


def test_a_mask_of_values_used_for_keys_is_found() -> None:
    keys, values = LAYERS["keys otherwise than values"]
    swapped = (StoredSide(keys.quantizer, values.exact), StoredSide(values.quantizer, keys.exact))
    wanted = oracle(call(), (keys, values))
    assert (recipe_attention([swapped], SPLIT)(0, call()) - wanted).abs().max() > 0.01
