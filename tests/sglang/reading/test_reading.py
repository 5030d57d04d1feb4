"""What a request reads does not depend on what was served before it: by `cache` never, by `fresh` as cuts say."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import Json, MixedLayers, ModelFolder, ProfileOf, Prompts, SaveProfile, Serve
    from sglang_server import Server

    from kvtuner.exported_configs.profile.profile import Profile

TOKENS = 12


@pytest.fixture(scope="module")
def served(
    model_folder: ModelFolder, profile_of: ProfileOf, mixed_layers: MixedLayers, save_profile: SaveProfile
) -> tuple[Path, Profile, tuple[str, ...]]:
    """A model, its mixed profile, and the flags that serve it."""
    folder = model_folder("llama-gqa", num_hidden_layers=4)
    config = AutoConfig.from_pretrained(folder)
    profile = profile_of(config, mixed_layers(config))
    return folder, profile, ("--kvtuner-profile", str(save_profile(profile)))


@pytest.fixture(scope="module")
def requests(prompts: Prompts) -> list[list[int]]:
    """Prompts that share beginnings of many lengths, longer than a chunk and shorter than a page among them."""
    stem = prompts(150)[0]
    tails = prompts(*range(1, 25), seed=5)
    return [stem[: 6 * index] + tail for index, tail in enumerate(tails)]


@pytest.fixture(scope="module")
def growing(prompts: Prompts) -> list[list[int]]:
    """Prompts that all fit into a small pool, but not with their answers."""
    return list(prompts(*[40] * 6, seed=9))


LONG_ANSWER = 110
TIE = 0.01
"""Nats between the two likeliest tokens that a flipped code may turn round."""
# Tokens that a request may end before count less: more requests are let in than can grow to their end.
MANY = {"ignore_eos": False}


@pytest.fixture(scope="module")
def alone(
    served: tuple[Path, Profile, tuple[str, ...]], requests: list[list[int]], growing: list[list[int]], serve: Serve
) -> tuple[list[Json], list[Json]]:
    """What each request is answered when it is the only one, without a prefix cache or chunks, reading the cache."""
    folder, _, flags = served
    single = ("--disable-radix-cache", "--max-running-requests", "1", "--chunked-prefill-size", "-1")
    with serve(folder, *flags, *single, "--kvtuner-attend", "cache") as server:
        short = [server.generate([ids], TOKENS, top=2)[0] for ids in requests]
        return short, [server.generate([ids], LONG_ANSWER, top=2, **MANY)[0] for ids in growing]


def assert_same(found: list[Json], alone: list[Json]) -> None:
    """Assert the same tokens, unless the two likeliest were all but equal: company changes how products are summed."""
    for answer, single in zip(found, alone, strict=True):
        pairs = enumerate(zip(answer["output_ids"], single["output_ids"], strict=False))
        parting = next((position for position, (a, b) in pairs if a != b), None)
        if parting is None:
            assert len(answer["output_ids"]) == len(single["output_ids"])
            continue
        (first, _, _), (second, _, _) = single["meta_info"]["output_top_logprobs"][parting]
        assert first - second < TIE, (parting, first, second)


@pytest.mark.parametrize("page_size", [1, 16, pytest.param(64, marks=pytest.mark.full)])
def test_by_cache_answers_do_not_depend_on_hits_chunks_company_eviction_retraction_or_aborts(
    page_size: int,
    served: tuple[Path, Profile, tuple[str, ...]],
    requests: list[list[int]],
    growing: list[list[int]],
    alone: tuple[list[Json], list[Json]],
    serve: Serve,
    prompts: Prompts,
) -> None:
    folder, _, flags = served
    small = (
        "--page-size", str(page_size), "--chunked-prefill-size", "64", "--schedule-conservativeness", "0.1",
        "--max-total-tokens", "512", "--max-running-requests", "6",
        *(["--enable-mixed-chunk"] if page_size == 16 else []),
    )  # fmt: skip
    short, long = alone
    with serve(folder, *flags, *small, "--kvtuner-attend", "cache") as server:
        for _ in range(2):
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda ids: server.generate([ids], TOKENS)[0], requests))
            assert_same(answers, short)
            churn = prompts(*[160] * 10, seed=77)
            server.generate(churn, 4)
            abort_in_mid_stream(server, churn[0])
        assert_same(server.generate(growing, LONG_ANSWER, **MANY), long)
        assert "KV cache pool is full. Retract requests." in server.log
        server.generate([requests[-1]], TOKENS)
        again = server.generate([requests[-1]], TOKENS)[0]
        server.flush()
        used = json.loads(server.get("/v1/loads"))["loads"][0]["num_used_tokens"]
    assert used == 0, "aborted requests left tokens behind"
    assert_same([again], short[-1:])
    assert again["meta_info"]["cached_tokens"] >= (len(requests[-1]) - 1) // page_size * page_size


def abort_in_mid_stream(server: Server, ids: list[int]) -> None:
    """Hang up while a long answer comes, and see that its tokens are given back."""
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    body = json.dumps({"input_ids": ids, "stream": True, "sampling_params": sampling}).encode()
    request = Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        assert answer.readline().startswith(b"data: ")
    deadline = time.monotonic() + 60
    while json.loads(server.get("/v1/loads"))["loads"][0]["num_running_reqs"]:
        assert time.monotonic() < deadline, "the aborted request goes on"
        time.sleep(0.2)


@torch.no_grad()
def host_answer(model: Any, profile: Profile, chunks: list[list[int]], num_tokens: int) -> list[int]:
    """Greedy tokens of the transformers host, the prompt read in the given cuts."""
    cache = KVTunerCache.from_profile(profile, model.config)
    with cache.reading("hit"):
        for chunk in chunks:
            logits = model(torch.tensor([chunk]), past_key_values=cache).logits[0, -1]
    tokens = []
    for _ in range(num_tokens):
        tokens.append(int(logits.argmax()))
        logits = model(torch.tensor([tokens[-1:]]), past_key_values=cache).logits[0, -1]
    return tokens


def test_by_fresh_answers_are_the_transformers_hosts_with_the_same_cuts(
    served: tuple[Path, Profile, tuple[str, ...]], serve: Serve, prompts: Prompts
) -> None:
    folder, profile, flags = served
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answers(ids: list[int]) -> tuple[list[int], list[int]]:
        """What the transformers host answers, read in one piece and in the server's chunks."""
        chunks = [ids[:64], ids[64:128], ids[128:]]
        return host_answer(model, profile, [ids], TOKENS), host_answer(model, profile, chunks, TOKENS)

    # Only where the cuts change the host's answer does the server's show how it read.
    long, cut = next(
        (ids, cut) for ids in prompts(*[150] * 12, seed=3) for whole, cut in [answers(ids)] if whole != cut
    )
    hit = [*long[:100], *prompts(20, seed=4)[0]]
    with serve(folder, *flags, "--chunked-prefill-size", "64", "--page-size", "1") as server:
        server.flush()
        chunked = server.generate([long], TOKENS)[0]
        after_hit = server.generate([hit], TOKENS)[0]
    assert chunked["meta_info"]["cached_tokens"] == 0
    assert chunked["output_ids"] == cut
    assert after_hit["meta_info"]["cached_tokens"] == 100
    # What was hit had been written in the cuts of the request before.
    assert after_hit["output_ids"] == host_answer(model, profile, [hit[:64], hit[64:100], hit[100:]], TOKENS)
