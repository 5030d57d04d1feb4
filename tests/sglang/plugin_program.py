"""Run by test_plugin.py in a process of its own: `python plugin_program.py CHECK PROFILE MODEL`, one check each."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from types import SimpleNamespace
from typing import Any

import sglang.srt.plugins
from sglang.srt.server_args import ServerArgs

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang import serving
from kvtuner.runtime_loader.sglang.compat import attention, pool, versions

CHECK, PROFILE, MODEL = sys.argv[1:]


def parse(*flags: str) -> ServerArgs:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(["--model-path", MODEL, "--device", "cpu", *flags]))


def refusal(call: Any, *arguments: Any, **named: Any) -> str:
    try:
        call(*arguments, **named)
    except (ServingError, SystemExit) as error:
        return str(error)
    raise AssertionError(f"{call} refused nothing")


def plain_namespaces_are_read_as_without_the_plugin() -> None:
    assert ServerArgs.from_cli_args(argparse.Namespace(model_path=MODEL)).model_path == MODEL
    assert serving._active is None
    parse("--kvtuner-profile", PROFILE)
    before = serving._active
    assert before is not None
    ServerArgs.from_cli_args(argparse.Namespace(model_path=MODEL))  # another tool's, beside a launch with a profile
    assert serving._active is before


def a_plain_launch_after_one_with_a_profile_is_plain() -> None:
    parse("--kvtuner-profile", PROFILE)
    assert serving._active is not None
    assert "KVTUNER_SERVING" in os.environ
    parse()
    assert serving._active is None
    assert "KVTUNER_SERVING" not in os.environ


def another_release_is_refused() -> None:
    versions.version = lambda _: "0.5.24"  # type: ignore[assignment]
    line = refusal(parse, "--kvtuner-profile", PROFILE)
    assert line == (
        "kvtuner: this kvtuner serves with sglang 0.5.23, but 0.5.24 is installed; install that one, or a newer kvtuner"
    )
    parse()  # and does not matter without a profile


def what_kernels_take_and_rows_have_not_is_refused() -> None:
    attention.refuse_unserved({"sinks": None, "logit_cap": 3.0, "is_causal": True, "xai_temperature_len": -1})
    for name, value in {
        "sinks": object(), "custom_mask": object(), "is_causal": False, "sliding_window_size": 7,
        "xai_temperature_len": 3, "window_kv_offsets": object(), "score_mod": object(),
    }.items():  # fmt: skip
        assert refusal(attention.refuse_unserved, {name: value})


def layers_that_do_not_read_their_whole_past_are_refused() -> None:
    import torch
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    def model(**changes: Any) -> torch.nn.Module:
        layer = RadixAttention(num_heads=2, head_dim=16, scaling=0.25, num_kv_heads=1, layer_id=0)
        for name, value in changes.items():
            setattr(layer, name, value)
        return torch.nn.ModuleDict({"attn": layer})

    attention.check_layers(model(), 512)
    assert "attn of this model is not a decoder's" in refusal(
        attention.check_layers, model(attn_type=AttentionType.ENCODER_ONLY), 512
    )
    assert "not a decoder's" in refusal(attention.check_layers, model(is_cross_attention=True), 512)
    assert "by position" in refusal(attention.check_layers, model(xai_temperature_len=64), 512)
    assert "sinks" in refusal(attention.check_layers, model(sinks=torch.zeros(2)), 512)
    assert "window of 511 tokens, shorter than the context of 512" in refusal(
        attention.check_layers, model(sliding_window_size=510), 512
    )
    assert "sinks" in refusal(attention.check_layers, model(attention_sink_bias=torch.zeros(2)), 512)
    covering = model(sliding_window_size=511)
    attention.check_layers(covering, 512)
    assert covering["attn"].sliding_window_size == -1


def another_kind_of_pool_is_refused() -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    class Packed:
        pass

    class Configurator(SimpleNamespace):
        def configure(self, **_: Any) -> Any:
            return SimpleNamespace(token_to_kv_pool=self.pool)

    KVCacheConfigurator.configure = Configurator.configure
    built: list[Any] = []
    pool.on_built(Packed, lambda _, found: built.append(found), serving.refusing)
    configure: Any = KVCacheConfigurator.configure
    configure(Configurator(pool=Packed(), is_draft_worker=False))
    assert [type(found) for found in built] == [Packed]
    configure(Configurator(pool=object(), is_draft_worker=True))
    line = refusal(configure, Configurator(pool=object(), is_draft_worker=False))
    assert "SGLang built a object for this model, not a Packed" in line
    assert len(built) == 1


def an_engine_with_finished_arguments_is_refused() -> None:
    from kvtuner.runtime_loader.sglang import engine

    assert "not server_args" in refusal(engine, PROFILE, server_args=parse())


def models_that_generate_no_text_or_read_more_are_refused() -> None:
    from sglang.srt.configs.model_config import AttentionArch

    from kvtuner.errors import UnsupportedModelError
    from kvtuner.runtime_loader.sglang.compat import model

    model.mambaish_config = lambda _: None  # type: ignore[assignment]
    plain = {"is_hybrid_swa": False, "is_multimodal": False, "is_generation": True}
    shape = {"hf_config": SimpleNamespace(architectures=["X"]), "attention_arch": AttentionArch.MHA}
    model.refuse_other_pools(SimpleNamespace(**shape, **plain))
    for name, value in plain.items():
        try:
            model.refuse_other_pools(SimpleNamespace(**shape, **{**plain, name: not value}))
        except UnsupportedModelError as error:
            assert "X" in str(error)
        else:
            raise AssertionError(name)


def schedulers_that_serve_something_else_are_refused() -> None:
    parse("--kvtuner-profile", PROFILE)
    assert "before the profile was asked for" in refusal(serving._hear, [{"kvtuner_profile": "sha256:1"}])
    serving._checked_digest = "sha256:1"
    serving._hear([{"kvtuner_profile": "sha256:1"}])
    assert "scheduler 1 serves sha256:2, but the launcher checked sha256:1" in refusal(
        serving._hear, [{"kvtuner_profile": "sha256:1"}, {"kvtuner_profile": "sha256:2"}]
    )
    assert "scheduler 0 does not serve the profile" in refusal(serving._hear, [{"status": "ready"}])


def a_long_context_is_warned_of() -> None:
    import logging

    from kvtuner.exported_configs.load import load_profile

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvtuner").addHandler(handler)
    profile = load_profile(PROFILE)
    limited = copy.copy(profile)
    serving.calibrated_positions = lambda _: 256  # type: ignore[assignment]
    serving._warn_beyond_calibration(limited, 256)
    assert not said
    serving._warn_beyond_calibration(limited, 512)
    assert "calibrated over 256 positions, the server's context has 512" in said[0]


sglang.srt.plugins.load_plugins()
globals()[CHECK]()
