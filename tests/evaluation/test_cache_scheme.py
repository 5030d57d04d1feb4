"""Schemes to store a cache: sized as they are stored, and added in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

from kvtuner.calibration.forward.simulator import LayerSpec, read_back
from kvtuner.calibration.model_loading import ModelSource, read_shape
from kvtuner.errors import PrecisionError
from kvtuner.evaluation import cache_scheme as schemes
from kvtuner.evaluation.cache_scheme import (
    CacheScheme,
    Fp8Scheme,
    ServingRanks,
    named_scheme,
    named_schemes,
    register_scheme,
)
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair
from kvtuner.quant import QuantSpec
from kvtuner.search_spaces.budget import Budget

if TYPE_CHECKING:
    from pathlib import Path

GEOMETRY = ModelGeometry(num_layers=5, num_attention_heads=8, num_kv_heads=4, head_dim=32, v_head_dim=32)


class HalvedScheme(CacheScheme):
    """A toy: keys of 4 bits, values in the model's dtype, as if SGLang had a flag for it."""

    @classmethod
    def of(cls, geometry: ModelGeometry) -> HalvedScheme:
        specs = {layer: LayerSpec(QuantSpec(4)) for layer in range(geometry.num_layers)}
        pairs = (PrecisionPair(4, 16),) * geometry.num_layers
        return cls(name="halved", pairs=pairs, rows=geometry.row_shape(), key="halved", specs=specs)

    def cache(self, config: Any, read_plan: Any, context_length: int) -> Any:
        return DynamicCache(config=config)

    def server_flags(self, folder: Path) -> tuple[str, ...]:
        return ("--kv-cache-dtype", "halved")


def test_a_toy_scheme_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profile_of: Any) -> None:
    monkeypatch.setattr(schemes, "_SCHEMES", dict(schemes._SCHEMES))
    register_scheme("halved", HalvedScheme.of)
    shape = read_shape(ModelSource("demo"))
    scheme = named_scheme("halved", shape)
    geometry = shape.geometry
    assert isinstance(scheme, HalvedScheme)
    keys = torch.randn(1, geometry.num_kv_heads, 7, geometry.head_dim)
    assert not torch.equal(read_back(scheme.specs[0].k, keys), keys), "simulated"
    assert torch.equal(read_back(scheme.specs[0].v, keys), keys)
    assert scheme.bytes_on(ServingRanks.of(geometry)) == scheme.bytes_per_token
    assert geometry.bf16_bytes_per_token() // 2 < scheme.bytes_per_token < geometry.bf16_bytes_per_token()
    assert scheme.mean_bits == 10
    assert scheme.keeps(Budget.parse("10bit").constraint(geometry))
    assert not scheme.keeps(Budget.parse("9bit").constraint(geometry))
    assert scheme.server_flags(tmp_path) == ("--kv-cache-dtype", "halved")
    assert isinstance(scheme.cache(shape.config, "decode", 512), DynamicCache)


def test_schemes_have_the_flags_that_ask_sglang_for_them(tmp_path: Path) -> None:
    shape = read_shape(ModelSource("demo"))
    assert named_scheme("bf16", shape).server_flags(tmp_path) == ()
    assert named_scheme("fp8", shape).server_flags(tmp_path) == ("--kv-cache-dtype", "fp8_e4m3")
    flag, file = named_scheme("8", shape).server_flags(tmp_path)
    assert (flag, file) == ("--kvtuner-profile", str(tmp_path / "K8V8.json"))
    assert (tmp_path / "K8V8.json").is_file()
    assert "--kvtuner-axis-key" in named_scheme("K4V4-per-channel", shape).server_flags(tmp_path)


def test_a_scheme_is_named_once_however_it_is_written(profile_of: Any) -> None:
    shape = read_shape(ModelSource("demo"))
    profile = named_scheme("K4V4", shape).profile
    assert profile is not None
    assert [each.name for each in named_schemes(["bf16", "profile", "8"], shape, profile)] == [
        "bf16", "profile", "K8V8",
    ]  # fmt: skip
    with pytest.raises(PrecisionError, match="K8V8 is asked twice"):
        named_schemes(["K8V8", "8"], shape, profile)


def packed(*pairs: str) -> CacheScheme:
    return CacheScheme(name="c", pairs=tuple(map(PrecisionPair.parse, pairs)), rows=GEOMETRY.row_shape(), key="c")


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 5])
def test_bytes_on_a_rank_are_those_that_the_budget_counts(tp_size: int, pp_size: int) -> None:
    ranks = ServingRanks.of(GEOMETRY, tp_size=tp_size, pp_size=pp_size)
    pairs = [PrecisionPair.parse(text) for text in ("16", "K8V4", "K4V2", "2", "K2V8")]
    constraint = Budget.parse("100KiB/token").constraint(GEOMETRY, tp_size=tp_size, pp_size=pp_size)
    assert ranks.bytes_per_token(pairs) == max(constraint.stage_costs(pairs))
    assert ranks == ServingRanks(constraint.shape, constraint.stages)


def test_fp8_is_judged_by_bytes_of_its_own() -> None:
    fp8, k8v8 = Fp8Scheme.of(GEOMETRY), packed(*["K8V8"] * 5)
    own = 5 * 4 * 64
    assert fp8.bytes_on(ServingRanks.of(GEOMETRY)) == own < k8v8.bytes_on(ServingRanks.of(GEOMETRY))
    for text, fits in (
        (f"{own}B/token", True),
        (f"{own - 1}B/token", False),
        ("8bpe", True),
        ("7.9bpe", False),
        ("50%", True),
        ("49%", False),
        ("8bit", True),
        ("7bit", False),
    ):
        assert fp8.keeps(Budget.parse(text).constraint(GEOMETRY)) == fits, text
    assert not k8v8.keeps(Budget.parse("8bpe").constraint(GEOMETRY))


def test_fp8_keeps_the_budget_in_every_stage() -> None:
    stage = 3 * 2 * 64  # the larger of two stages, half of the heads
    assert Fp8Scheme.of(GEOMETRY).bytes_on(ServingRanks.of(GEOMETRY, tp_size=2, pp_size=2)) == stage
    for size, fits in ((stage, True), (stage - 1, False)):
        constraint = Budget.parse(f"{size}B/token").constraint(GEOMETRY, tp_size=2, pp_size=2)
        assert Fp8Scheme.of(GEOMETRY).keeps(constraint) == fits
