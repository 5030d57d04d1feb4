"""Every option that does not work is refused by name, and every one that may touch the cache was looked at."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat.releases import ACCEPTED, NEWEST, release_rules
from kvtuner.runtime_loader.sglang.options.option_refusals import (
    refuse_beside_other_layers,
    refuse_beside_per_channel,
    refuse_flags,
    refuse_of_index,
    refuse_of_latents,
    refuse_place_of_index,
)
from kvtuner.runtime_loader.sglang.options.option_rules import (
    DISAGGREGATION_RULES,
    HICACHE_RULES,
    INDEX_RULES,
    LATENT_RULES,
    LMCACHE_RULES,
    LORA_RULES,
    METADATA_BACKEND,
    OTHER_LAYER_RULES,
    PER_CHANNEL_RULES,
    REPLICA_RULES,
    RULES,
    SPECULATION_RULES,
    OptionRule,
    backend_rules,
)

if TYPE_CHECKING:
    from fixture_types import RunProgram

EVERY_RULE = (*backend_rules(METADATA_BACKEND), *RULES, *HICACHE_RULES)


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.name)
def test_every_rule_refuses_its_option_by_name(rule: OptionRule) -> None:
    fine = {each.name: each.works[-1] for each in EVERY_RULE}
    for device in ("cpu", "cuda", "cuda:1"):
        for hicache_only in (False, True):
            refuse_flags(arguments(device=device, **fine), {}, hicache_only=hicache_only)
    for hicache_only in (False, True)[: 1 if rule.of_attention else 2]:
        what = "a quantized host tier" if hicache_only else "a packed KV pool"
        with pytest.raises(ServingError, match=f"{rule.flag} 7 does not work with {what}"):
            refuse_flags(arguments(device="cpu", **{**fine, rule.name: 7}), {}, hicache_only=hicache_only)
    if rule.of_attention:
        refuse_flags(arguments(device="cpu", **{**fine, rule.name: 7}), {}, hicache_only=True)
    del fine[rule.name]
    with pytest.raises(ServingError, match=f"this SGLang has no option {rule.name}"):
        refuse_flags(arguments(device="cpu", **fine), {})


@pytest.mark.parametrize("rule", SPECULATION_RULES, ids=lambda rule: rule.name)
def test_every_rule_of_speculative_decoding_refuses_its_option_beside_drafts_alone(rule: OptionRule) -> None:
    fine = {each.name: each.works[-1] for each in EVERY_RULE}
    chains = {**fine, **{each.name: each.works[-1] for each in SPECULATION_RULES}}
    bad = {"enable_hierarchical_cache": True, "cuda_graph_config.prefill.backend": "breakable"}.get(rule.name, 7)
    for algorithm in ("NGRAM", "EAGLE", "EAGLE3"):
        refuse_flags(arguments(device="cpu", **{**chains, "speculative_algorithm": algorithm}), {})
        drafting = {**chains, "speculative_algorithm": algorithm, rule.name: bad}
        with pytest.raises(ServingError, match=f"{rule.flag}.* does not work with speculative decoding on a packed KV"):
            refuse_flags(arguments(device="cpu", **drafting), {})
    if rule.name not in fine:
        refuse_flags(arguments(device="cpu", **{**chains, rule.name: bad}), {})


@pytest.mark.parametrize("rule", LORA_RULES, ids=lambda rule: rule.name)
def test_every_rule_of_adapters_refuses_its_option_beside_them_alone(rule: OptionRule) -> None:
    fine = {each.name: each.works[-1] for each in (*EVERY_RULE, *SPECULATION_RULES, *DISAGGREGATION_RULES)}
    fine = {**fine, "enable_hierarchical_cache": False, "speculative_algorithm": None}
    works: object = {
        "enable_hierarchical_cache": True,
        "speculative_algorithm": "NGRAM",
        "disaggregation_mode": "decode",
        "enable_lmcache": True,
    }.get(rule.name, 2)
    refuse_flags(arguments(device="cpu", **{**fine, rule.name: works}), {})
    refuse_flags(arguments(device="cpu", **{**fine, rule.name: works, "enable_lora": False, "lora_paths": ["a"]}), {})
    for asked in ({"enable_lora": True}, {"enable_lora": None, "lora_paths": ["a"]}):
        adapters = {**fine, **asked}
        refuse_flags(arguments(device="cpu", **adapters), {})
        with pytest.raises(ServingError, match=f"{rule.flag}.* does not work with LoRA on a packed KV pool"):
            refuse_flags(arguments(device="cpu", **{**adapters, rule.name: works}), {})


@pytest.mark.parametrize("rule", REPLICA_RULES, ids=lambda rule: rule.name)
def test_every_rule_of_replicas_refuses_its_option_beside_them_alone(rule: OptionRule) -> None:
    fine = {each.name: each.works[-1] for each in (*EVERY_RULE, *SPECULATION_RULES)}
    fine = {**fine, **{each.name: each.works[0] for each in REPLICA_RULES}}
    bad: object = {"enable_hierarchical_cache": True, "speculative_algorithm": "NGRAM"}.get(rule.name, 2)
    refuse_flags(arguments(device="cpu", **{**fine, rule.name: bad}), {})
    refuse_flags(arguments(device="cpu", **{**fine, "dp_size": 2}), {})
    with pytest.raises(ServingError, match=f"{rule.flag}.* does not work with replicas of a packed KV pool"):
        refuse_flags(arguments(device="cpu", **{**fine, "dp_size": 2, rule.name: bad}), {})


@pytest.mark.parametrize("rule", LMCACHE_RULES, ids=lambda rule: rule.name)
def test_every_rule_of_lmcache_refuses_its_option_beside_it_alone(rule: OptionRule) -> None:
    fine = {each.name: each.works[-1] for each in (*EVERY_RULE, *SPECULATION_RULES)}
    fine = {**fine, **{each.name: each.works[-1] for each in LMCACHE_RULES}}
    bad: object = {"enable_hierarchical_cache": True, "speculative_algorithm": "NGRAM"}.get(rule.name, 2)
    alone = {**fine, "nnodes": 1, rule.name: bad}
    refuse_flags(arguments(device="cpu", **alone), {})
    refuse_flags(arguments(device="cpu", **{**fine, "enable_lmcache": True}), {})
    with pytest.raises(ServingError, match=f"{rule.flag}.* does not work with LMCache on a packed KV pool"):
        refuse_flags(arguments(device="cpu", **{**alone, "enable_lmcache": True}), {})


@pytest.mark.parametrize("rule", DISAGGREGATION_RULES, ids=lambda rule: rule.name)
def test_every_rule_of_disaggregation_refuses_its_option_beside_it_alone(rule: OptionRule) -> None:
    fine = {each.name: each.works[-1] for each in (*EVERY_RULE, *SPECULATION_RULES)}
    fine = {**fine, **{each.name: each.works[-1] for each in DISAGGREGATION_RULES}}
    switches = {"enable_hierarchical_cache": True, "enable_lmcache": True}
    bad: object = {**switches, "speculative_algorithm": "NGRAM"}.get(rule.name, 2)
    alone = {**fine, rule.name: bad}
    refuse_flags(arguments(device="cpu", **({**alone, "nnodes": 1} if rule.name == "dp_size" else alone)), {})
    for side in ("prefill", "decode"):
        refuse_flags(arguments(device="cpu", **{**fine, "disaggregation_mode": side}), {})
        with pytest.raises(ServingError, match=f"{rule.flag}.* does not work with disaggregation of a packed KV pool"):
            refuse_flags(arguments(device="cpu", **{**alone, "disaggregation_mode": side}), {})


@pytest.mark.parametrize("rule", PER_CHANNEL_RULES, ids=lambda rule: rule.name)
def test_every_rule_of_keys_per_channel_refuses_its_option(rule: OptionRule) -> None:
    fine = {"page_size": 64, **{each.name: each.works[0] for each in PER_CHANNEL_RULES}}
    refuse_beside_per_channel(arguments(**fine), 32)
    with pytest.raises(ServingError, match=f"{rule.flag} 7 does not work with keys per channel of 32 tokens"):
        refuse_beside_per_channel(arguments(**{**fine, rule.name: 7}), 32)
    for page_size in (None, 1, 16, 48):
        with pytest.raises(
            ServingError, match=f"--page-size {page_size or 1} does not .* add --page-size 32, or a mul"
        ):
            refuse_beside_per_channel(arguments(**{**fine, "page_size": page_size}), 32)


@pytest.mark.parametrize("rule", OTHER_LAYER_RULES, ids=lambda rule: rule.name)
def test_every_rule_beside_other_layers_refuses_its_option(rule: OptionRule) -> None:
    fine = {each.name: each.works[0] for each in OTHER_LAYER_RULES}
    refuse_beside_other_layers(arguments(**fine), "layers with a window")
    with pytest.raises(ServingError, match=f"{rule.flag} 7 does not work with a packed KV pool beside layers with a"):
        refuse_beside_other_layers(arguments(**{**fine, rule.name: 7}), "layers with a window")


@pytest.mark.parametrize("rule", LATENT_RULES, ids=lambda rule: rule.name)
def test_every_rule_of_latents_refuses_its_option(rule: OptionRule) -> None:
    fine = {each.name: each.works[0] for each in LATENT_RULES}
    refuse_of_latents(arguments(**fine), hicache_only=False)
    with pytest.raises(ServingError, match=rf"{rule.flag} 7 does not work with a packed pool of latents \(MLA\)"):
        refuse_of_latents(arguments(**{**fine, rule.name: 7}), hicache_only=False)


@pytest.mark.parametrize("rule", INDEX_RULES, ids=lambda rule: rule.name)
def test_every_rule_of_an_index_refuses_its_option(rule: OptionRule) -> None:
    fine = {each.name: each.works[0] for each in INDEX_RULES}
    refuse_of_index(arguments(**fine))
    with pytest.raises(ServingError, match=rf"{rule.flag} 7 does not work with latents that an index selects from"):
        refuse_of_index(arguments(**{**fine, rule.name: 7}))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_a_gpu_without_both_kernels_of_an_index_is_refused(capability: tuple[int, int]) -> None:
    refuse_place_of_index(None)
    refuse_place_of_index((9, 0))
    with pytest.raises(ServingError, match=rf"has compute capability {capability[0]}\.{capability[1]}, and SGLang's"):
        refuse_place_of_index(capability)


def test_a_release_that_no_index_was_tried_with_is_refused() -> None:
    for name, release in ACCEPTED.items():
        if name == NEWEST:
            refuse_place_of_index((9, 0), release)
        else:
            with pytest.raises(ServingError, match=rf"tested with a newer SGLang alone; install sglang {NEWEST}"):
                refuse_place_of_index((9, 0), release)


def test_keys_per_channel_stand_beside_no_other_layers() -> None:
    fine = {"page_size": 64, **{each.name: each.works[0] for each in PER_CHANNEL_RULES}}
    with pytest.raises(
        ServingError, match="layers that have a window, keep a state or read another layer's keys were never"
    ):
        refuse_beside_per_channel(arguments(**fine), 32, has_other_layers=True)


def test_adapters_beside_a_quantized_host_tier() -> None:
    fine = {each.name: each.works[-1] for each in EVERY_RULE}
    refuse_flags(arguments(device="cpu", **fine), {}, hicache_only=True)
    with pytest.raises(ServingError, match="--enable-hierarchical-cache does not work with LoRA on a quantized host"):
        refuse_flags(arguments(device="cpu", **{**fine, "enable_lora": True}), {}, hicache_only=True)


@pytest.mark.parametrize("algorithm", ["STANDALONE", "DFLASH", "DSPARK", "UNO", "FROZEN_KV_MTP"])
def test_drafts_that_are_no_tested_chains(algorithm: str) -> None:
    fine = {each.name: each.works[-1] for each in (*backend_rules(METADATA_BACKEND), *RULES)}
    with pytest.raises(ServingError, match=f"--speculative-algorithm {algorithm} does not work with a packed KV pool"):
        refuse_flags(arguments(device="cpu", **{**fine, "speculative_algorithm": algorithm}), {})


def test_options_of_a_host_tier_do_not_matter_without_one() -> None:
    fine = {each.name: each.works[-1] for each in (*backend_rules(METADATA_BACKEND), *RULES)}
    refuse_flags(arguments(device="cpu", **{**fine, "enable_hierarchical_cache": False}), {})
    with pytest.raises(ServingError, match="KVTuner HiCache would not be used: add --enable-hierarchical-cache"):
        refuse_flags(arguments(device="cpu", **{**fine, "enable_hierarchical_cache": False}), {}, hicache_only=True)


def arguments(**values: object) -> SimpleNamespace:
    """Return arguments as SGLang resolves them; a dot leads into what an argument holds."""
    found = SimpleNamespace(dp_size=1, nnodes=1)
    for name, value in values.items():
        *path, last = name.split(".")
        holder = found
        for step in path:
            if not hasattr(holder, step):
                setattr(holder, step, SimpleNamespace())
            holder = getattr(holder, step)
        setattr(holder, last, value)
    return found


WORDS = (
    "compile", "memory_saver", "session", "kernel", "multimodal", "radix", "kv", "cache", "pool", "page", "attention",
    "attn", "swa", "offload", "elastic", "dp", "cp_", "speculative", "dllm", "lora", "encoder", "embed", "pd",
    "overlap", "mixed", "ray", "determin", "sparse", "chunk", "quantization",
)  # fmt: skip
GOVERNED = {  # options of others that have a rule
    "speculative_": "speculative_algorithm",
    "disaggregation_": "disaggregation_mode",
    "hicache_": "enable_hierarchical_cache",
    "lora_": "enable_lora",
    "elastic_ep_": "elastic_ep_backend",
    "dllm_": "dllm_algorithm",
    "kv_canary_": "kv_canary",
    "encoder_": "encoder_only",
    "decoupled_spec_": "speculative_algorithm",
    "hisparse_": "enable_hisparse",
    "lmcache_": "enable_lmcache",
    "flexkv_": "enable_flexkv",
    "pdmux_": "enable_pdmux",
    "unified_cache_external_linker_": "enable_unified_cache_external_linker",
    "enable_dp_": "attn_dp_size",
    "torch_compile_": "enable_torch_compile",
}


DECIDED = {"attn_dp_size", "cuda_graph_config.prefill.backend", "cuda_graph_config.decode.backend"}
"""What SGLang makes of other options; no flag has the name."""


def test_every_option_of_sglang_that_may_touch_the_cache_was_looked_at(run_program: RunProgram) -> None:
    done = run_program("-c", OPTIONS)
    options = set(json.loads(done.stdout.splitlines()[-1]))
    rules = {
        rule.name for rule in (*EVERY_RULE, *SPECULATION_RULES, *LORA_RULES, *REPLICA_RULES, *DISAGGREGATION_RULES)
    }
    assert rules - options <= DECIDED | release_rules().absent, "rules for options that this SGLang does not have"
    assert set(GOVERNED.values()) <= rules
    touching = {name for name in options if any(word in name for word in WORDS)}
    harmless = set(Path(__file__).parents[1].joinpath("harmless_options.txt").read_text().split())
    assert not harmless & rules
    unseen = {name for name in touching - rules - harmless if not name.startswith(tuple(GOVERNED))}
    assert not unseen, sorted(unseen)


OPTIONS = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps(sorted({action.dest for action in parser._actions})))
"""
