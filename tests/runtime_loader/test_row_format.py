"""What one rank stores: its heads with their own constants, its layers, the formula's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from profile_samples import make_profile
from transformers import Gemma3TextConfig

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PACKED_BITS
from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader.row_format import RowFormat, pool_formats, rank_formats
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from fixture_types import ProfileOf


@pytest.fixture
def profile(model_of: Any, profile_of: ProfileOf) -> Any:
    config = model_of("llama-gqa-64", torch.float32).config
    generator = torch.Generator().manual_seed(0)
    mu, lam = (torch.rand((2, 64), generator=generator).half() + 0.5 for _ in range(2))
    centered = Transform(TransformKind.parse("centered+balanced"), mu, lam)
    return profile_of(config, [LayerQuantization(4, 2, centered), LayerQuantization(16, 8)])


@pytest.mark.parametrize(
    ("tp_size", "heads"),
    [(1, [[0, 1]]), (2, [[0], [1]]), (4, [[0], [0], [1], [1]])],
    ids=["all", "split", "replicated"],
)
def test_a_rank_has_its_heads_with_their_own_constants(profile: Any, tp_size: int, heads: list[list[int]]) -> None:
    whole = profile.quant_spec(0, "k").transform
    for tp_rank, mine in enumerate(heads):
        first, second = rank_formats(profile, range(2), tp_rank=tp_rank, tp_size=tp_size)
        assert first.k.num_heads == first.v.num_heads == second.v.num_heads == len(mine)
        assert torch.equal(first.k.spec.transform.mu, whole.mu[mine])
        assert torch.equal(first.k.spec.transform.lam, whole.lam[mine])
        stored = first.bytes_per_token(torch.bfloat16) + second.bytes_per_token(torch.bfloat16)
        assert stored == profile.bytes_per_token(tp_size)
        assert second.bytes_per_token(torch.float32) - second.bytes_per_token(torch.bfloat16) == 2 * 64 * len(mine)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_rank_has_whole_latents_and_their_rotary_channels_as_values(tp_size: int) -> None:
    geometry = ModelGeometry(2, 8, 1, 64, 0, rope_dim=16)
    profile = make_profile([LayerQuantization(4, None), LayerQuantization(16, None)], geometry=geometry)
    formats = rank_formats(profile, range(2), tp_rank=tp_size - 1, tp_size=tp_size)
    assert [(layer.k.bits, layer.k.head_dim) for layer in formats] == [(4, 64), (16, 64)]
    assert {(layer.v.bits, layer.v.head_dim, layer.is_latent) for layer in formats} == {(16, 16, True)}
    stored = sum(layer.bytes_per_token(torch.bfloat16) for layer in formats)
    # Codes and four scale words, and rotary channels beside both layers.
    assert stored == profile.bytes_per_token(tp_size) == 48 + 2 * 64 + 2 * 2 * 16


def test_a_stage_has_its_layers_and_no_others(profile: Any) -> None:
    (only,) = rank_formats(profile, range(1, 2))
    assert (only.k.bits, only.v.bits) == (16, 8)
    with pytest.raises(ProfileError, match="the profile has full layers 0-1, but this rank serves layers 1 to 2"):
        rank_formats(profile, range(1, 3))


def test_layers_with_a_window_share_a_pool_in_the_served_dtype(profile_of: ProfileOf) -> None:
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
    config = Gemma3TextConfig(
        **windows, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64
    )
    profile = profile_of(config, [LayerQuantization(4, 2), LayerQuantization(16, 8)], by_kinds=True)
    formats = pool_formats(profile, range(4), tp_rank=1, tp_size=2)
    assert [(layer.k.bits, layer.v.bits) for layer in formats] == [(16, 16), (4, 2), (16, 16), (16, 8)]
    assert {(layer.k.num_heads, layer.k.head_dim, layer.v.head_dim) for layer in formats} == {(1, 16, 16)}
    assert formats[1:4:2] == rank_formats(profile, (1, 3), tp_rank=1, tp_size=2)
    with pytest.raises(ProfileError, match="the profile has full layers 1, 3, but this rank serves layers 1 to 5"):
        pool_formats(profile, (1, 5))


@pytest.mark.parametrize("kind", ["none", "hadamard"])
@pytest.mark.parametrize("bits", PACKED_BITS)
def test_fp16_states_at_the_end_of_their_range_come_back_finite(bits: int, kind: str) -> None:
    states = torch.randn(300, 1, 64, generator=torch.Generator().manual_seed(bits)).half()
    states[:, 0, 5], states[:, 0, 11] = 65504.0, -65504.0
    states[0, 0, 3] = torch.nan
    row_format = RowFormat(1, 64, QuantSpec(bits, Transform(TransformKind.parse(kind))))
    rows = row_format.pack(states)
    found, wanted = row_format.unpack(rows, torch.float16), row_format.unpack(rows, torch.float32)
    assert torch.isnan(found[0]).all()
    assert torch.isfinite(found[1:]).all()
    assert float(wanted[1:].abs().max()) > 65519, "or nothing was beyond fp16"
    torch.testing.assert_close(found[1:].float(), wanted[1:].clamp(-65504, 65504).half().float(), rtol=0, atol=0)
