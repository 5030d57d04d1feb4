"""Adds a key transform by the two tables of the recipe, and takes it from the candidate pass to the transformers cache.

A process of its own: the profile's schema reads the names when it is imported, as it would after an edit of the tables.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvtuner.quant import STEPS, Step
from kvtuner.transforms import TRANSFORMS, TransformKind

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

    from kvtuner.calibration.sensitivity import SensitivityTable
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.search_spaces.space import Configuration


def flip(x: Tensor, _: None) -> Tensor:
    """Negate every other channel: its own inverse, and on queries and keys at once it cancels."""
    signs = 1.0 - 2.0 * (torch.arange(x.shape[-1], device=x.device) % 2)
    return x * signs


STEPS["flipped"] = Step(flip, flip, flip)
TRANSFORMS["flipped+hadamard"] = TransformKind("flipped+hadamard", "f")


def tiny_model() -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvtuner.calibration.forward.attention_hook import register

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)).eval().requires_grad_(False)
    model.set_attn_implementation(register())
    return model


def measured(model: LlamaForCausalLM) -> SensitivityTable:
    """The measured table; the errors of all other key transforms are raised, so that the new one is chosen."""
    from kvtuner.calibration.batches import batches
    from kvtuner.calibration.candidate_pass import CandidateMeasurement, QuantizationOptions
    from kvtuner.calibration.forward.chain import DecoderChain
    from kvtuner.calibration.forward.read_plan import ReadPlan
    from kvtuner.calibration.sensitivity import SensitivityTable
    from kvtuner.calibration.transform_statistics import measure_constants
    from kvtuner.geometry import ModelGeometry

    chain = DecoderChain(model, ModelGeometry.from_config(model.config))
    data = list(batches(torch.randint(2, 64, (2, 32)), 64, offsets="random", seed=0))
    constants = measure_constants(chain, data)
    measurement = CandidateMeasurement(chain, constants, ReadPlan("decode", 8), QuantizationOptions(), 1, 0)
    measurement.run(data)
    scores = {
        candidate: replace(score, fisher=score.fisher + (candidate.transform != "flipped+hadamard"))
        for candidate, score in measurement.scores().items()
    }
    table = SensitivityTable({}, chain.geometry, constants, scores)
    assert 0 < table.of(0, "k", 2)["flipped+hadamard"].e_o < 10
    assert "flipped+hadamard" not in table.of(0, "v", 2)
    return table


def chosen(table: SensitivityTable) -> Configuration:
    from kvtuner.precision import PrecisionPair
    from kvtuner.search_spaces.space import build_space

    geometry = table.geometry
    space = build_space(table, "fisher", geometry.row_shape(), keep=dict.fromkeys((0, 1), PrecisionPair(4, 8)))
    return space.configuration([0, 0])


def written(table: SensitivityTable, configuration: Configuration) -> Profile:
    """The profile of the configuration, as it is read from its file."""
    from kvtuner.exported_configs.profile.build import (
        AskedBudget,
        LayerQuantization,
        build_profile,
        dump_profile,
        unsearched,
    )
    from kvtuner.exported_configs.profile.evidence import ModelIdentity
    from kvtuner.exported_configs.profile.load import load_profile

    layers = [
        LayerQuantization(4, 8, table.constants_of(layer, "k", choice.k_transform))
        for layer, choice in enumerate(configuration)
    ]
    digest = "sha256:" + 64 * "0"
    identity = ModelIdentity(
        id="tiny", revision=None, config_sha256=digest, architecture="LlamaForCausalLM", dtype="float32"
    )
    profile = build_profile(
        geometry=table.geometry,
        layers=layers,
        k_group_size=16,
        v_group_size=16,
        symmetric=False,
        model=identity,
        budget=AskedBudget("by hand"),
        quality=None,
        provenance=unsearched(),
    )
    return load_profile(dump_profile(profile))


def check_cache(profile: Profile) -> None:
    """What the cache returns is what `quant.py` reads, and decoding in stored space is attention to it."""
    from kvtuner.quant import QuantSpec, Transform
    from kvtuner.runtime_loader.packed_attention import PackedRows, ScoreScaling, TorchAttention
    from kvtuner.runtime_loader.row_format import rank_formats
    from kvtuner.runtime_loader.transformers_cache import KVTunerCache

    spec = QuantSpec(4, Transform(TransformKind.parse("flipped+hadamard")), group_size=16)
    k, v, q = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 4, 16)
    expected = spec.simulate(k.transpose(1, 2)).transpose(1, 2)
    keys, values = KVTunerCache.stored_by(profile, "cache").update(k, v, 0)
    assert torch.equal(keys, expected)
    assert not torch.equal(keys, QuantSpec(4, group_size=16).simulate(k.transpose(1, 2)).transpose(1, 2))

    formats = rank_formats(profile, range(1))[0]
    stored_k, stored_v = (
        PackedRows(torch.zeros(9, part.row_bytes(torch.float32), dtype=torch.uint8), part)
        for part in (formats.k, formats.v)
    )
    attention, slots = TorchAttention(), torch.arange(9)
    attention.store(stored_k, stored_v, slots, k[0].transpose(0, 1), v[0].transpose(0, 1))
    found = attention.decode(q, stored_k, stored_v, torch.tensor([0, 9]), slots, ScoreScaling(0.25))
    wanted = torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(2), keys, values, scale=0.25, enable_gqa=True)
    assert torch.allclose(found, wanted[:, :, 0], atol=1e-5)


def main() -> None:
    from kvtuner.report.layer_strip import KIND_CODES, profile_layers

    table = measured(tiny_model())
    configuration = chosen(table)
    assert [choice.k_transform for choice in configuration] == ["flipped+hadamard"] * 2
    profile = written(table, configuration)
    assert profile.transform_name(0, "k") == "flipped+hadamard"
    assert {KIND_CODES[row.k_transform] for row in profile_layers(profile)} == {"f"}
    check_cache(profile)


if __name__ == "__main__":
    main()
