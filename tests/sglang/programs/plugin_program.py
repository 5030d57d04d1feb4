"""Run by test_plugin.py in a process of its own: `python plugin_program.py CHECK PROFILE MODEL`, one check each."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sglang.srt.plugins
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig

from kvtuner.errors import KVTunerError
from kvtuner.runtime_loader.sglang import activation
from kvtuner.runtime_loader.sglang.compat import pool, releases
from kvtuner.runtime_loader.sglang.compat.attention import loaded_layers, triton_backend
from kvtuner.runtime_loader.sglang.process_state import process_state

CHECK, PROFILE, MODEL = sys.argv[1:]


def parse(*flags: str) -> ServerArgs:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(["--model-path", MODEL, "--device", "cpu", *flags]))


def refusal(call: Any, *arguments: Any, **named: Any) -> str:
    try:
        call(*arguments, **named)
    except (KVTunerError, SystemExit) as error:
        return str(error)
    raise AssertionError(f"{call} refused nothing")


def check_that_plain_namespaces_are_read_as_without_the_plugin() -> None:
    assert ServerArgs.from_cli_args(argparse.Namespace(model_path=MODEL)).model_path == MODEL
    assert process_state().loaded_request is None
    parse("--kvtuner-profile", PROFILE)
    before = process_state().loaded_request
    assert before is not None
    ServerArgs.from_cli_args(argparse.Namespace(model_path=MODEL))  # another tool's, beside a launch with a profile
    assert process_state().loaded_request is before


def check_that_a_plain_launch_after_one_with_a_profile_is_plain() -> None:
    parse("--kvtuner-profile", PROFILE)
    assert process_state().loaded_request is not None
    assert "KVTUNER_SERVING" in os.environ
    parse()
    assert process_state().loaded_request is None
    assert "KVTUNER_SERVING" not in os.environ


def check_that_another_release_is_refused() -> None:
    releases.version = lambda _: "0.5.24"  # type: ignore[assignment]
    line = refusal(parse, "--kvtuner-profile", PROFILE)
    assert line == (
        "kvtuner: this kvtuner serves with sglang 0.5.22 or 0.5.23, but 0.5.24 is installed; install one of those, or"
        " a newer kvtuner"
    )
    parse()  # and does not matter without a profile


def check_that_what_kernels_take_and_rows_have_not_is_refused() -> None:
    triton_backend.refuse_unserved({"sinks": object(), "logit_cap": 3.0, "is_causal": True, "xai_temperature_len": -1})
    for name, value in {
        "custom_mask": object(), "is_causal": False, "sliding_window_size": 7,
        "xai_temperature_len": 3, "window_kv_offsets": object(), "score_mod": object(),
    }.items():  # fmt: skip
        assert refusal(triton_backend.refuse_unserved, {name: value})


def check_that_layers_that_do_not_read_their_whole_past_are_refused() -> None:
    import torch
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    def model(**changes: Any) -> torch.nn.Module:
        layer = RadixAttention(num_heads=2, head_dim=16, scaling=0.25, num_kv_heads=1, layer_id=0)
        for name, value in changes.items():
            setattr(layer, name, value)
        return torch.nn.ModuleDict({"attn": layer})

    loaded_layers.check_attention_layers(model(), 512)
    assert "attn of this model is not a decoder's" in refusal(
        loaded_layers.check_attention_layers, model(attn_type=AttentionType.ENCODER_ONLY), 512
    )
    assert "not a decoder's" in refusal(loaded_layers.check_attention_layers, model(is_cross_attention=True), 512)
    assert "by position" in refusal(loaded_layers.check_attention_layers, model(xai_temperature_len=64), 512)
    assert "window of 511 tokens, shorter than the context of 512" in refusal(
        loaded_layers.check_attention_layers, model(sliding_window_size=510), 512
    )
    windowed = model(sliding_window_size=63)
    loaded_layers.check_attention_layers(windowed, 512, {0: 64})
    assert windowed["attn"].sliding_window_size == 63
    assert "window of 64 tokens, shorter" in refusal(loaded_layers.check_attention_layers, windowed, 512, {0: 65})
    loaded_layers.check_attention_layers(windowed, 512, {0: 63})
    assert windowed["attn"].sliding_window_size == 62, "one token more than configured is taken away"
    assert "reads all tokens in SGLang, but by its profile the last 64" in refusal(
        loaded_layers.check_attention_layers, model(), 512, {0: 64}
    )
    loaded_layers.check_windows(SimpleNamespace(sliding_window_size=63), {0: 64, 2: 64})
    for size, windows, what in ((None, {0: 64}, "no window"), (63, {0: 64, 2: 32}, "one window of 64 tokens")):
        line = refusal(loaded_layers.check_windows, SimpleNamespace(sliding_window_size=size), windows)
        assert f"SGLang's attention has {what} for this model" in line
    covering = model(sliding_window_size=511)
    loaded_layers.check_attention_layers(covering, 512)
    assert covering["attn"].sliding_window_size == -1


def check_that_layers_that_do_not_read_latents_as_they_are_packed_are_refused() -> None:
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    def model(v_head_dim: int = 32, **changes: Any) -> torch.nn.Module:
        sizes = {"num_heads": 2, "head_dim": 40, "num_kv_heads": 1, "v_head_dim": v_head_dim}
        layer = RadixAttention(scaling=0.25, layer_id=0, **sizes)
        for name, value in changes.items():
            setattr(layer, name, value)
        return torch.nn.ModuleDict({"attn": layer})

    of_one = model(k_scale=torch.ones(()), k_scale_float=1.0)
    loaded_layers.read_absorbed(of_one, (32, 8))
    assert of_one["attn"].k_scale is None
    for other in (model(v_head_dim=40), model(tp_k_head_num=2)):
        line = refusal(loaded_layers.read_absorbed, other, (32, 8))
        assert line.startswith("attn of this model does not read latents of 32 and 8 channels in SGLang")
    assert "scales for an fp8 cache" in refusal(loaded_layers.read_absorbed, model(v_scale_float=0.5), (32, 8))


def check_that_what_an_index_gives_attention_and_packed_latents_have_not_is_refused() -> None:
    import torch

    from kvtuner.runtime_loader.sglang.attention.indexed_attention_backend import IndexedAttnBackend

    backend, stored = IndexedAttnBackend.__new__(IndexedAttnBackend), []
    backend.pool = SimpleNamespace(set_mla_kv_buffer=lambda *given: stored.append(given))
    batch, one, selected = SimpleNamespace(out_cache_loc=None), torch.ones(1, 1, 8), torch.zeros(1, 4)

    def store(k_rope: Any = one, saves: bool = True, indices: Any = selected, cap: float = 0.0, **rest: Any) -> Any:
        return backend._store(one, k_rope, SimpleNamespace(logit_cap=cap), batch, saves, indices, rest)

    assert store(cos_sin_cache=None, is_neox=False) is selected
    assert len(stored) == 1
    given = {"attn_sink": torch.ones(2), "llama_4_scaling": torch.ones(2), "is_neox": True}
    for name, value in given.items():
        assert f"SGLang gives {name} to attention here" in refusal(store, **{name: value})
    assert "gives no k_rope" in refusal(store, None)
    assert "gives no topk_indices" in refusal(store, indices=None)
    assert "gives no new latents" in refusal(store, saves=False)
    assert "gives a cap of scores" in refusal(store, cap=30.0)
    assert len(stored) == 1


def check_that_another_kind_of_pool_is_refused() -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    class Packed:
        pass

    class Configurator(SimpleNamespace):
        spec_aux_config = SimpleNamespace(eagle_draft_num_layers=None)

        def configure(self, **_: Any) -> Any:
            return SimpleNamespace(token_to_kv_pool=self.pool, req_to_token_pool=None)

    KVCacheConfigurator.configure = Configurator.configure
    built: list[Any] = []
    pool.on_built([Packed], lambda _, found, _requests: built.append(found))
    configure: Any = KVCacheConfigurator.configure
    configure(Configurator(pool=Packed(), is_draft_worker=False))
    assert [type(found) for found in built] == [Packed]
    draft_pool = SimpleNamespace(size=3, page_size=1, get_kv_size_bytes=lambda: (0, 0))
    configure(Configurator(pool=draft_pool, is_draft_worker=True))
    line = refusal(configure, Configurator(pool=object(), is_draft_worker=False))
    assert "SGLang built a object for this model, not a Packed" in line
    assert len(built) == 1


def check_that_an_engine_with_finished_arguments_is_refused() -> None:
    from kvtuner.runtime_loader.sglang import engine

    assert "not server_args" in refusal(engine, PROFILE, server_args=parse())


def check_that_a_refused_engine_leaves_the_process_serving_what_it_served() -> None:
    from kvtuner.runtime_loader.sglang import engine

    parse("--kvtuner-profile", PROFILE)
    state, variable = process_state(), os.environ["KVTUNER_SERVING"]
    state.checked_digest = "sha256:launcher"
    before = replace(state)
    refusal(engine, PROFILE + ".missing", model_path=MODEL)
    refusal(engine, PROFILE, strict=True, allow_derived=True, model_path=MODEL)
    assert state == before
    assert os.environ["KVTUNER_SERVING"] == variable


def check_that_models_that_generate_no_text_or_read_more_are_refused() -> None:
    from sglang.srt.configs.model_config import AttentionArch

    from kvtuner.errors import UnsupportedModelError
    from kvtuner.runtime_loader.sglang.compat import model

    model.mambaish_config = lambda _: None  # type: ignore[assignment]
    plain = {"is_hybrid_swa": False, "is_multimodal": False, "is_generation": True, "quantization": None}
    geometry = SimpleNamespace(layers=[], readers=())
    shape = {"hf_config": SimpleNamespace(architectures=["X"], model_type="x"), "attention_arch": AttentionArch.MHA}
    shape |= {"swa_attention_layer_ids": [0], "context_len": 64}
    model.refuse_other_pools(SimpleNamespace(**shape, **plain), geometry)
    others = {"is_hybrid_swa": True, "is_multimodal": True, "is_generation": False, "quantization": "gguf"}
    for name, value in others.items():
        try:
            model.refuse_other_pools(SimpleNamespace(**shape, **{**plain, name: value}), geometry)
        except UnsupportedModelError as error:
            assert "X" in str(error)
        else:
            raise AssertionError(name)


def check_that_schedulers_that_serve_something_else_are_refused() -> None:
    parse("--kvtuner-profile", PROFILE)
    assert "before the profile was asked for" in refusal(activation._compare_digests, [{"kvtuner_profile": "sha256:1"}])
    process_state().checked_digest = "sha256:1"
    activation._compare_digests([{"kvtuner_profile": "sha256:1"}])
    assert "scheduler 1 serves sha256:2, but the launcher checked sha256:1" in refusal(
        activation._compare_digests, [{"kvtuner_profile": "sha256:1"}, {"kvtuner_profile": "sha256:2"}]
    )
    assert "scheduler 0 does not serve the profile" in refusal(activation._compare_digests, [{"status": "ready"}])


class Log(logging.Handler):
    """What the plugin says, by level."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[str, str]] = []
        logging.getLogger("kvtuner").addHandler(self)
        logging.getLogger("kvtuner").setLevel("INFO")

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append((record.levelname, record.getMessage()))


def resolved(*flags: str, **recorded: Any) -> list[tuple[str, str]]:
    """What SGLang's own resolution makes the plugin say of a profile that records the served model, but for changes."""
    from kvtuner.exported_configs.identity.model_identity import identity_of
    from kvtuner.exported_configs.profile.build import dump_profile
    from kvtuner.exported_configs.profile.load import load_profile

    config = AutoConfig.from_pretrained(MODEL)
    model = identity_of(config, id="Owner/llama-gqa", revision=None, dtype="float32").model_copy(update=recorded)
    path = Path(PROFILE).with_name("recorded.json")
    path.write_bytes(dump_profile(load_profile(PROFILE).model_copy(update={"model": model})))
    log = Log()
    server_args = parse("--kvtuner-profile", str(path), "--dtype", "float32", *flags)
    server_args.resolve_once()
    assert process_state().checked_digest == load_profile(path).digest
    logging.getLogger("kvtuner").removeHandler(log)
    return [each for each in log.messages if not each[1].startswith("kvtuner: serving ")]


YARN = '{"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 1024}'
OTHER = "sha256:" + "0" * 64


def check_that_the_searched_model_is_served_without_a_word() -> None:
    assert resolved() == []
    assert resolved("--kvtuner-strict") == []


def check_that_another_configuration_is_refused_unless_it_is_allowed() -> None:
    wider = ("--json-model-override-args", '{"intermediate_size": 112}')
    line = refusal(resolved, *wider)
    assert line.startswith("kvtuner: the profile of Owner/llama-gqa is for configuration sha256:")
    assert line.endswith("or allow a derived one by --kvtuner-allow-derived")
    ((level, message),) = resolved(*wider, "--kvtuner-allow-derived")
    assert level == "WARNING"
    assert message.endswith("; allowed: kvtuner eval PROFILE --model llama-gqa tells what that costs")


def check_that_a_fine_tune_of_the_hub_is_refused_unless_it_is_allowed() -> None:
    place = Path(PROFILE).parent / "models--Owner--llama-chat" / "snapshots" / ("c0ffee" * 7)[:40]
    place.parent.mkdir(parents=True)
    place.symlink_to(MODEL)
    globals()["MODEL"] = str(place)
    line = refusal(resolved)
    assert "is for Owner/llama-gqa, but this model is Owner/llama-chat, of the same configuration" in line
    ((level, message),) = resolved("--kvtuner-allow-derived")
    assert (level, "tells what that costs" in message) == ("WARNING", True)
    ((level, message),) = resolved(id="Owner/llama-chat", revision="decade" * 6)
    assert (level, "was searched on revision decade" in message) == ("WARNING", True)
    assert resolved("--kvtuner-strict", id="Owner/llama-chat", revision="c0ffee" * 6) == []


def check_that_a_quantized_checkpoint_of_the_hub_is_served_with_warnings() -> None:
    place = Path(PROFILE).parent / "models--Owner--llama-gqa-AWQ" / "snapshots" / ("c0ffee" * 7)[:40]
    place.parent.mkdir(parents=True)
    place.symlink_to(MODEL)
    globals()["MODEL"] = str(place)
    (name, weights) = resolved(weight_quantization="awq")
    assert [name[0], weights[0]] == ["WARNING", "WARNING"]
    assert "is for Owner/llama-gqa, but this model is called Owner/llama-gqa-AWQ" in name[1]
    assert "is for Owner/llama-gqa, but this model is Owner/llama-gqa-AWQ" in refusal(resolved)


def check_that_weights_are_compared_where_they_are_and_an_absence_is_logged() -> None:
    from kvtuner.exported_configs.identity.checkpoint_hash import checkpoint_sha256

    sha256 = checkpoint_sha256(Path(MODEL))
    assert sha256 is not None
    assert resolved("--kvtuner-strict", checkpoint_sha256=sha256) == []
    assert resolved("--kvtuner-strict", checkpoint_sha256=sha256, id="demo") == []
    assert "but this model's weights are others, llama-gqa (sha256:" in refusal(resolved, checkpoint_sha256=OTHER)
    ((level, message),) = resolved("--kvtuner-allow-derived", checkpoint_sha256=OTHER)
    assert (level, "tells what that costs" in message) == ("WARNING", True)
    bare = Path(PROFILE).parent / "llama-gqa"  # as before a download
    shutil.copytree(MODEL, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    globals()["MODEL"] = str(bare)
    ((level, message),) = resolved(checkpoint_sha256=sha256)
    assert (level, "weights were not compared with those of the profile" in message) == ("INFO", True)
    assert refusal(resolved, "--kvtuner-strict", checkpoint_sha256=sha256).endswith("or drop --kvtuner-strict")


def check_that_what_is_warned_of_is_refused_strictly() -> None:
    for flags, recorded, expected in (
        ((), {"rope_sha256": OTHER}, "measured under other rotations"),
        (("--json-model-override-args", YARN), {}, "measured under other rotations"),
        ((), {"weight_quantization": "awq"}, "on weights with quantization awq, but this model's have none"),
        ((), {"id": "model"}, "is for model, but this model is called llama-gqa"),
        ((), {"id": "Owner/other"}, "is for Owner/other, but this model is called llama-gqa"),
    ):
        warnings = [message for level, message in resolved(*flags, **recorded) if level == "WARNING"]  # type: ignore[arg-type]
        assert len(warnings) == 1
        assert warnings[0].startswith("kvtuner: ")
        assert expected in warnings[0]
        line = refusal(resolved, *flags, "--kvtuner-strict", **recorded)
        assert expected in line
        assert line.endswith("or drop --kvtuner-strict")


def check_that_an_older_profile_is_served_with_one_line() -> None:
    older = {"config_sha256": OTHER, "rope_sha256": None, "weight_quantization": None, "max_positions": None}
    ((level, message),) = resolved(**older)
    assert (level, "made by hand or by an older kvtuner" in message) == ("INFO", True)
    assert "or drop --kvtuner-strict" in refusal(resolved, "--kvtuner-strict", **older)


def check_that_another_architecture_is_refused_whatever_is_allowed() -> None:
    line = refusal(resolved, "--kvtuner-allow-derived", architecture="XForCausalLM")
    assert "is for XForCausalLM, but this model is LlamaForCausalLM" in line


def check_that_a_long_context_is_warned_of() -> None:
    activation.calibrated_positions = lambda _: 256  # type: ignore[assignment]
    assert resolved("--context-length", "256") == []
    ((level, message),) = resolved("--context-length", "512")
    assert level == "WARNING"
    assert "calibrated over 256 positions, but the context here is 512" in message
    assert "drop --kvtuner-strict" in refusal(resolved, "--context-length", "512", "--kvtuner-strict")


sglang.srt.plugins.load_plugins()
globals()[CHECK]()
