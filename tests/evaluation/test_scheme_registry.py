"""Schemes that a user can name: a toy one is added by the public function, and a whole evaluation runs it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

from kvtuner.calibration.forward.simulator import LayerSpec, read_back
from kvtuner.calibration.model_loading import ModelSource, read_shape
from kvtuner.cli import main
from kvtuner.errors import OptionError, PrecisionError
from kvtuner.evaluation import scheme_registry
from kvtuner.evaluation.cache_scheme import CacheScheme, RankLayout
from kvtuner.evaluation.scheme_registry import named_scheme, named_schemes, register_scheme
from kvtuner.exported_configs.profile.build import dump_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.precision import ExactWindow, PrecisionPair
from kvtuner.quant import QuantSpec
from kvtuner.search_spaces.budget import Budget

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import ModelFolder, ProfileOf

    from kvtuner.geometry import ModelGeometry


class ToyScheme(CacheScheme):
    """A toy: keys of 4 bits, values in the model's dtype, as if SGLang had a flag for it."""

    @classmethod
    def of(cls, geometry: ModelGeometry) -> ToyScheme:
        specs = {layer: LayerSpec(QuantSpec(4)) for layer in range(geometry.num_layers)}
        pairs = (PrecisionPair(4, 16),) * geometry.num_layers
        return cls(name="toy", pairs=pairs, rows=geometry.row_shape(), key="toy", specs=specs)

    def cache(self, config: Any, read_plan: Any, context_length: int) -> Any:
        return DynamicCache(config=config)

    def server_flags(self, folder: Path) -> tuple[str, ...]:
        return ("--kv-cache-dtype", "toy")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy scheme is registered for the length of a test."""
    monkeypatch.setattr(scheme_registry, "_FACTORIES", dict(scheme_registry._FACTORIES))
    register_scheme("toy", ToyScheme.of)


@pytest.mark.usefixtures("toy")
def test_a_toy_scheme_is_sized_simulated_and_served(tmp_path: Path) -> None:
    shape = read_shape(ModelSource("demo"))
    scheme = named_scheme("toy", shape)
    geometry = shape.geometry
    assert isinstance(scheme, ToyScheme)
    keys = torch.randn(1, geometry.num_kv_heads, 7, geometry.head_dim)
    assert not torch.equal(read_back(scheme.specs[0].k, keys), keys), "simulated"
    assert torch.equal(read_back(scheme.specs[0].v, keys), keys)
    assert scheme.bytes_on(RankLayout.of(geometry)) == scheme.bytes_per_token
    assert geometry.bf16_bytes_per_token() // 2 < scheme.bytes_per_token < geometry.bf16_bytes_per_token()
    assert scheme.mean_bits == 10
    assert scheme.keeps(Budget.parse("10bit").constraint(geometry))
    assert not scheme.keeps(Budget.parse("9bit").constraint(geometry))
    assert scheme.server_flags(tmp_path) == ("--kv-cache-dtype", "toy")
    assert isinstance(scheme.cache(shape.config, "decode", 512), DynamicCache)


def test_a_scheme_that_is_only_simulated_is_refused_by_name_where_it_would_be_stored(tmp_path: Path) -> None:
    geometry = read_shape(ModelSource("demo")).geometry
    pairs = (PrecisionPair(4, 16),) * geometry.num_layers
    scheme = CacheScheme(name="paper", pairs=pairs, rows=geometry.row_shape(), key="paper", specs={})
    with pytest.raises(OptionError, match="no server stores paper"):
        scheme.server_flags(tmp_path)
    with pytest.raises(OptionError, match="no cache here stores paper"):
        scheme.cache(None, "decode", 512)


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_a_toy_scheme_is_evaluated_by_its_name(
    model_folder: ModelFolder, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, profile = str(model_folder("llama-gqa")), tmp_path / "profile.json"
    searched = named_scheme("K8V8", read_shape(ModelSource(model))).profile
    assert searched is not None
    profile.write_bytes(dump_profile(searched))
    status = main([
        "eval", str(profile), "--model", model, "--data", str(corpus_file), "--sequence-length", "64",
        "--sequences", "2,2,3", "--levels", "likelihood,recall", "--lengths", "40", "--problems", "2",
        "--questions", "2", "--all-questions", "--against", "toy", "--out", str(tmp_path / "out"), "--json",
    ])  # fmt: skip
    assert status == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    results = {(cell["measure"], result["subject"]): result["mean"] for cell in cells for result in cell["results"]}
    assert 0 < results["kl_nats_per_token", "profile"] < results["kl_nats_per_token", "toy"], "4 bits lose more than 8"
    assert ("accuracy", "toy") in results, "its own transformers cache answers"


def test_schemes_have_the_flags_that_ask_sglang_for_them(tmp_path: Path) -> None:
    shape = read_shape(ModelSource("demo"))
    assert named_scheme("bf16", shape).server_flags(tmp_path) == ()
    assert named_scheme("fp8", shape).server_flags(tmp_path) == ("--kv-cache-dtype", "fp8_e4m3")
    flag, file = named_scheme("8", shape).server_flags(tmp_path)
    assert (flag, file) == ("--kvtuner-profile", str(tmp_path / "K8V8.json"))
    assert (tmp_path / "K8V8.json").is_file()
    assert named_scheme("K2V4-per-channel", shape).server_flags(tmp_path)[2:] == ("--page-size", "32")
    per_channel = load_profile(tmp_path / "K2V4-per-channel.json")
    assert per_channel.has_per_channel_keys and per_channel.window == ExactWindow(32)


def test_a_scheme_is_named_once_however_it_is_written(profile_of: ProfileOf) -> None:
    shape = read_shape(ModelSource("demo"))
    profile = named_scheme("K4V4", shape).profile
    assert profile is not None
    assert [each.name for each in named_schemes(["bf16", "profile", "8"], shape, profile)] == [
        "bf16", "profile", "K8V8",
    ]  # fmt: skip
    with pytest.raises(PrecisionError, match="K8V8 is asked twice"):
        named_schemes(["K8V8", "8"], shape, profile)
