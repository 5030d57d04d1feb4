"""Models in which an index selects the latents that a query reads: served packed, beside SGLang's own index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from served_layers.sparse_latents import SPARSE, TOPK, round_index, select_all
from served_layers.two_kinds import number, packed_bytes
from tiny.small_search import SMALL, TRIALS
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.precision import ExactWindow

if TYPE_CHECKING:
    from fixture_types import (
        Agreement,
        Compare,
        CompareServed,
        MixedProfile,
        ModelFolder,
        ProfileOf,
        Prompts,
        Refused,
        RunCommand,
        RunProgram,
        SaveProfile,
        Serve,
    )

    from kvtuner.read_plan_names import ReadPlanName

LAYERS = 5
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek-v32": {**SPARSE["deepseek-v32"], "num_hidden_layers": LAYERS},
    "glm-moe-dsa": {
        **SPARSE["glm-moe-dsa"],
        "num_hidden_layers": LAYERS,
        "indexer_types": ["full", "shared", "full", "shared", "full"],
    },
}
"""Layers of all widths, some of which read by the index of the one before."""
ALL = {"index_topk": 512}
"""A selection that holds every token, whatever selects."""
CHUNK = 64
WINDOW = ExactWindow(8, 2)
OF_KEYS = 128 + 4
"""The bytes of a token's key of the index: 128 channels in fp8, and a scale."""


@pytest.mark.parametrize(
    ("name", "attend", "window"),
    [
        ("deepseek-v32", "fresh", WINDOW),
        ("glm-moe-dsa", "cache", WINDOW),
        pytest.param("deepseek-v32", "cache", None, marks=pytest.mark.full),
        pytest.param("glm-moe-dsa", "fresh", None, marks=pytest.mark.full),
    ],
)
def test_a_selection_of_all_tokens_is_read_as_the_host_reads_them(
    name: str, attend: str, window: ExactWindow | None, serve: Serve, compare: Compare, model_folder: ModelFolder,
    mixed_profile: MixedProfile, save_profile: SaveProfile, prompts: Prompts,
) -> None:  # fmt: skip
    folder = model_folder(name, **{**FAMILIES[name], **ALL})
    profile = mixed_profile(folder, by_kinds=True, window=window)
    plan: ReadPlanName | None = None if attend == "fresh" else "cache"
    flags = ("--kvtuner-attend", attend, "--chunked-prefill-size", str(2 * CHUNK), "--enable-metrics")
    with serve(folder, "--kvtuner-profile", str(save_profile(profile)), *flags) as server:

        def agree(lengths: tuple[int, ...], num_tokens: int, chunk: int | None = None, **options: Any) -> Agreement:
            return compare(server, folder, profile, prompts(*lengths), num_tokens, chunk, read_plan=plan, **options)

        agreements = [
            agree((5, 33, 1, 48), 24, of_prompts=True), agree((3 * CHUNK + 9, 70), 8, 2 * CHUNK, of_prompts=True),
        ]  # fmt: skip
        if window is None:  # the host has copies of all tokens, and a server those that it computed
            agreements.append(agree((2 * CHUNK + 26, 3 * CHUNK), 8, 2 * CHUNK, is_hit=True))
        log, metrics = server.log, server.get("/metrics")
    for agreement in agreements:
        assert agreement.own > 1e-5
        assert agreement.is_near, agreements
    assert "\n  0:K4V4,1:K8V8,2:K3V3,3:K4V4,4:K16V16\n" in log
    assert f"\n  attention torch, attend {attend}, self-test passed\n" in log
    assert f'kvtuner_kv_bits{{digest="{profile.digest}",layer="2",pp_rank="0",side="k",tp_rank="0"}} 3.0' in metrics


@pytest.mark.parametrize(("name", "window"), [("deepseek-v32", None), ("glm-moe-dsa", WINDOW)])
def test_queries_read_what_the_index_selects_for_them(
    name: str, window: ExactWindow | None, serve: Serve, compare: Compare, model_folder: ModelFolder,
    mixed_profile: MixedProfile, save_profile: SaveProfile, prompts: Prompts,
) -> None:  # fmt: skip
    folder = model_folder(name, **FAMILIES[name])
    profile = mixed_profile(folder, by_kinds=True, window=window)
    with serve(folder, "--kvtuner-profile", str(save_profile(profile)), "--chunked-prefill-size", "192") as server:
        at_once, dense = (
            compare(server, folder, profile, prompts(5, 109, TOPK + 1), 16, of_prompts=True, alter=alter)
            for alter in (round_index, select_all)
        )
        in_chunks = compare(
            server, folder, profile, prompts(221, 70), 4, 192, read_plan="hit", of_prompts=True, alter=round_index
        )
    # A few predictions are others: where scores nearly tie, an error of float32 selects another token.
    for agreement in (at_once, in_chunks):
        assert agreement.typical < 1e-6, (at_once, in_chunks, dense)
        assert agreement.divergence < dense.divergence / 10, (at_once, in_chunks, dense)
    assert dense.divergence > 0.1


@pytest.mark.full
def test_what_a_search_exports_by_default_is_served(
    run: RunCommand, corpus_file: Path, serve: Serve, compare: Compare, model_folder: ModelFolder, prompts: Prompts,
    tmp_path: Path,
) -> None:  # fmt: skip
    """An exact window among others, and the transforms that it chose."""
    folder = model_folder("glm-moe-dsa", **SPARSE["glm-moe-dsa"], kv_lora_rank=256)
    options = ("--data", corpus_file, *SMALL, *TRIALS, "--out", tmp_path, "--budget", "7bit")
    status, _, error = run("search", "--model", folder, *options)
    assert status == 0, error
    profile = load_profile(tmp_path / "profile.json")
    assert profile.window == ExactWindow(32)
    flags = ("--kvtuner-profile", str(tmp_path / "profile.json"), "--chunked-prefill-size", "192")
    with serve(folder, *flags) as server:
        agreement = compare(server, folder, profile, prompts(5, 109, TOPK + 1), 16, of_prompts=True, alter=round_index)
    assert agreement.own > 1e-3
    assert agreement.typical < 1e-6, agreement
    assert agreement.divergence < agreement.own / 10, agreement


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_16_bits_answer_as_a_server_without_a_profile(
    name: str, serve: Serve, model_folder: ModelFolder, profile_of: ProfileOf, save_profile: SaveProfile,
    prompts: Prompts,
) -> None:  # fmt: skip
    """Whatever the index selects, of prompts in chunks and behind hits; with all tokens answers are others."""
    folder = model_folder(name, **FAMILIES[name])
    native = profile_of(AutoConfig.from_pretrained(folder), [LayerQuantization(16, 16)] * LAYERS, by_kinds=True)
    by_profile = ("--kvtuner-profile", str(save_profile(native)))
    ids, answers = prompts(200, 33, 150), []
    for flags in ((), by_profile, ("--json-model-override-args", json.dumps(ALL))):
        with serve(folder, "--chunked-prefill-size", str(CHUNK), "--skip-server-warmup", *flags) as server:
            server.generate(ids, 1)
            behind_hits = server.generate(ids, 16, top=320)
            assert [answer["meta_info"]["cached_tokens"] for answer in behind_hits] == [192, 0, 128]
            tops = [top for answer in behind_hits for top in answer["meta_info"]["output_top_logprobs"]]
            answers.append([{token: logprob for logprob, token, _ in top} for top in tops])
    plain, packed, dense = answers
    # In float32, but for the order of sums.
    assert max(abs(one[token] - other[token]) for one, other in zip(plain, packed, strict=True) for token in one) < 1e-4
    assert max(abs(plain[0][token] - dense[0][token]) for token in plain[0]) > 0.1


@pytest.mark.parametrize("window", [None, pytest.param(WINDOW, marks=pytest.mark.full)], ids=str)
def test_kernels_pack_and_read_what_is_selected(
    window: ExactWindow | None, compare_served: CompareServed, model_folder: ModelFolder, mixed_profile: MixedProfile
) -> None:
    folder = model_folder("glm-moe-dsa", **{**FAMILIES["glm-moe-dsa"], **ALL})
    profile = mixed_profile(folder, by_kinds=True, window=window)
    served = compare_served(
        folder, profile, "--chunked-prefill-size", "64", lengths=(5, 130), num_tokens=4, chunk=64,
        KVTUNER_ATTENTION="triton",
    )  # fmt: skip
    assert served.agreement.own > 1e-5
    assert served.agreement.is_near, served.agreement
    assert "\n  attention triton, attend fresh, self-test passed\n" in served.log


def test_every_rank_holds_whole_latents_and_the_same_index(
    serve: Serve, compare: Compare, model_folder: ModelFolder, mixed_profile: MixedProfile, save_profile: SaveProfile,
    prompts: Prompts,
) -> None:  # fmt: skip
    folder = model_folder("deepseek-v32", **FAMILIES["deepseek-v32"])
    profile = mixed_profile(folder, by_kinds=True)
    flags = ("--kvtuner-profile", str(save_profile(profile)), "--tp-size", "2", "--chunked-prefill-size", "192")
    with serve(folder, *flags) as server:
        agreement = compare(server, folder, profile, prompts(5, 109, TOPK + 1), 8, of_prompts=True, alter=round_index)
        log = server.log
    assert agreement.typical < 1e-6, agreement
    assert agreement.divergence < 0.05, agreement  # with all tokens .4
    assert log.count(f"\n  {packed_bytes(profile):,} bytes per token") == 2
    assert log.count("keys of the index of 5 of 5 layers take ") == 2


def test_tokens_take_the_available_bytes_with_keys_of_the_index(
    serve: Serve, model_folder: ModelFolder, mixed_profile: MixedProfile, save_profile: SaveProfile
) -> None:
    folder = model_folder("glm-moe-dsa", **FAMILIES["glm-moe-dsa"])
    profile = mixed_profile(folder, by_kinds=True)
    flags = ("--max-total-tokens", "100000000", "--mem-fraction-static", "0.05", "--skip-server-warmup")
    with serve(folder, "--kvtuner-profile", str(save_profile(profile)), *flags) as server:
        log = server.log
    rows, tokens = number(r"([\d,]+) bytes are available for the KV cache", log), number(r": ([\d,]+) tokens\n", log)
    of_keys = number(r"keys of the index of 3 of 5 layers take ([\d,]+) bytes", log)
    assert 3 * OF_KEYS * tokens <= of_keys <= 3 * OF_KEYS * (tokens + 2 * CHUNK)  # in pages, one of them for padding
    one = packed_bytes(profile) + 3 * OF_KEYS
    assert tokens > 100_000
    assert rows - CHUNK * one < tokens * one <= rows


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--attention-backend triton", "cannot read a packed KV pool; drop it, or use --attention-backend dsa"),
        ("--dsa-prefill-backend tilelang", "cannot read a packed KV pool; drop it, or use --dsa-prefill-backend flas"),
        ("--dsa-decode-backend fa3", "cannot read a packed KV pool; drop it"),
        ("--enable-mixed-chunk", "does not work with latents that an index selects from: it was never tried"),
        ("--kv-cache-dtype fp8_e4m3", "does not work with a packed KV pool"),
        ("--enable-hierarchical-cache", "does not work with a packed pool of latents (MLA): it was never tried; drop"),
        ("--speculative-algorithm EAGLE", "does not work with a packed pool of latents (MLA): it was never tried; d"),
        ("--disaggregation-mode decode", "does not work with a packed pool of latents (MLA): it was never tried; dr"),
        ("--enable-lora", "does not work with a packed pool of latents (MLA): it was never tried; drop it"),
    ],
)
def test_what_does_not_go_with_an_index_is_refused(
    flags: str, line: str, refused: Refused, model_folder: ModelFolder, mixed_profile: MixedProfile,
    save_profile: SaveProfile,
) -> None:  # fmt: skip
    folder = model_folder("glm-moe-dsa", **FAMILIES["glm-moe-dsa"])
    profile = ("--kvtuner-profile", str(save_profile(mixed_profile(folder, by_kinds=True))))
    beside = ("--max-lora-rank", "4", "--lora-target-modules", "all") if flags == "--enable-lora" else ()
    found = refused(folder, *profile, *flags.split(), *beside, before_weights=True)
    assert found.startswith(f"{flags} {line}")


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        ("glm-moe-dsa", {"indexer_rope_interleave": False}, "without indexer_rope_interleave true in its config.json"),
        ("deepseek-v32", {"indexer_rope_interleave": True}, "without indexer_rope_interleave false in its config.json"),
        ("deepseek-v32", {"index_local_tokens": 4}, "SGLang gives the index of DeepseekV32ForCausalLM index_local_tok"),
        ("deepseek-v32", {"index_topk_freq": 2}, "SGLang gives other layers of DeepseekV32ForCausalLM an index than"),
    ],
)  # fmt: skip
def test_an_index_that_sglang_reads_otherwise_is_refused(
    name: str, overrides: dict[str, Any], line: str, refused: Refused, model_folder: ModelFolder
) -> None:
    folder, flag = model_folder(name, **FAMILIES[name]), "--json-model-override-args"
    assert refused(folder, "--enable-kvtuner-quant", flag, json.dumps(overrides)).startswith(line)


def test_requests_that_do_not_fit_together_are_staged_one_after_the_other(run_program: RunProgram) -> None:
    done = run_program(str(Path(__file__).parents[1] / "programs/indexed_program.py"))
    assert done.returncode == 0, done.stderr[-3000:]
