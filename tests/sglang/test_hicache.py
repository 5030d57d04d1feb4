"""Real servers whose prefixes go to host memory and storage and come back: nothing is lost, nothing wrong is read."""

from __future__ import annotations

import json
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvtuner.exported_configs.build import LayerChoice, uniform_profile
from kvtuner.exported_configs.evidence import ModelIdentity
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair
from kvtuner.runtime_loader.host_tier.stored_page import FAULTS, HEADER_BYTES
from kvtuner.runtime_loader.row_format import rank_formats
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvtuner.exported_configs.profile import Profile

TOKENS = 8
TIE = 0.01
"""Nats between the two likeliest tokens that a flipped code may turn round."""
SMALL = ("--max-total-tokens", "512", "--max-running-requests", "4", "--chunked-prefill-size", "64")
"""A device pool that evicts all the time."""


@pytest.fixture(scope="module")
def served(model_folder: Any, profile_of: Any, mixed_layers: Any, save_profile: Any) -> tuple[Path, Profile, Path]:
    """A model, its mixed profile, and the profile's file."""
    folder = model_folder("llama-gqa", num_hidden_layers=4)
    config = AutoConfig.from_pretrained(folder)
    profile = profile_of(config, mixed_layers(config))
    return folder, profile, save_profile(profile)


@pytest.fixture(scope="module")
def requests(prompts: Any) -> list[list[int]]:
    """Prompts that share beginnings of many lengths: three stems, cut everywhere, with tails of their own."""
    stems = prompts(180, 200, 220)
    tails = prompts(*[1 + index % 23 for index in range(48)], seed=5)
    return [stems[index % 3][: 20 + 4 * index] + tail for index, tail in enumerate(tails)]


@pytest.fixture(scope="module")
def truth(served: Any, requests: Any, serve: Any) -> list[Any]:
    """What each request is answered without a prefix cache or chunks, reading the cache."""
    folder, _, profile = served
    single = ("--disable-radix-cache", "--max-running-requests", "1", "--chunked-prefill-size", "-1")
    with serve(folder, "--kvtuner-profile", str(profile), *single, "--kvtuner-attend", "cache") as server:
        return [server.generate([ids], TOKENS, top=2)[0] for ids in requests]


@pytest.fixture
def tiers(served: Any) -> Callable[..., tuple[str, ...]]:
    """`tiers(storage=None, page_size=16, **config)`: flags of a packed pool with a host tier, by `cache` reading."""

    def flags(storage: Path | None = None, page_size: int = 16, profile: Path | None = None) -> tuple[str, ...]:
        config = json.dumps({"file_storage_path": str(storage), "prefetch_threshold": 1})
        below = ("--hicache-storage-backend", "file", "--hicache-storage-backend-config", config) if storage else ()
        wait = ("--hicache-storage-prefetch-policy", "wait_complete") if storage else ()
        return (
            "--kvtuner-profile", str(profile or served[2]), "--kvtuner-attend", "cache", "--enable-hierarchical-cache",
            "--hicache-ratio", "3", "--page-size", str(page_size), "--enable-cache-report", "--enable-metrics",
            *SMALL, *below, *wait,
        )  # fmt: skip

    return flags


def assert_same(answer: Any, single: Any) -> None:
    """The same tokens, unless the two likeliest were all but equal, and the same log-probabilities until then."""
    for position, (found, expected) in enumerate(zip(answer["output_ids"], single["output_ids"], strict=True)):
        (first, _, _), (second, _, _) = single["meta_info"]["output_top_logprobs"][position]
        if found != expected:
            assert first - second < TIE, (position, first, second)
            return
        (mine, _, _), (its, _, _) = (each["meta_info"]["output_token_logprobs"][position] for each in (answer, single))
        assert abs(mine - its) < TIE, (position, mine, its)


def sources(answer: Any) -> dict[str, int]:
    """Tokens of a prompt by where they were found."""
    details = answer["meta_info"].get("cached_tokens_details") or {}
    return {place: details.get(place, 0) for place in ("device", "host", "storage")}


def soak(server: Any, requests: list[list[int]], truth: list[Any], count: int, seed: int = 0) -> dict[str, int]:
    """Ask at random, four at a time, hang up on every tenth, and check every answer; tokens by where they came from."""
    order = random.Random(seed).choices(range(len(requests)), k=count)

    def ask(number: int) -> dict[str, int]:
        index = order[number]
        if number % 10 == 9:
            hang_up(server, requests[index])
        answer = server.generate([requests[index]], TOKENS)[0]
        assert_same(answer, truth[index])
        return sources(answer)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(count)))
    return {place: sum(each[place] for each in found) for place in ("device", "host", "storage")}


def hang_up(server: Any, ids: list[int]) -> None:
    """Leave while an answer is being made: its pages may be on their way up or down."""
    sampling = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
    body = json.dumps({"input_ids": ids, "stream": True, "sampling_params": sampling}).encode()
    request = Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        answer.readline()


def metric(server: Any, name: str, **labels: str) -> float:
    """Sum of a metric over what labels leave open."""
    total = 0.0
    for line in server.get("/metrics").splitlines():
        if re.match(rf"{name}\b", line) and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total


def ask_all(server: Any, requests: list[list[int]], truth: list[Any]) -> dict[str, int]:
    """Every request once, one after the other, checked."""
    found = []
    for ids, single in zip(requests, truth, strict=True):
        answer = server.generate([ids], TOKENS)[0]
        assert_same(answer, single)
        found.append(sources(answer))
    return {place: sum(each[place] for each in found) for place in ("device", "host", "storage")}


def test_what_comes_back_from_host_and_storage_answers_as_if_it_had_never_left(
    served: Any, requests: Any, truth: Any, tiers: Any, serve: Any, tmp_path: Path
) -> None:
    folder, profile, _ = served
    storage = tmp_path / "pages"
    with serve(folder, *tiers(storage)) as server:
        found = soak(server, requests, truth, 150)
        assert found["device"] > 0
        assert found["host"] > 0
        token_bytes = sum(profile.row_shape(1).pair_bytes(pair) for pair in profile.pairs[:-1])
        token_bytes += 2 * 4 * profile.geometry.num_kv_heads * profile.geometry.head_dim  # 16 bits, served in float32
        assert metric(server, "kvtuner_hicache_bytes_per_token") == token_bytes
        for direction in ("backup", "load"):
            pages = metric(server, "kvtuner_hicache_pages_total", direction=direction)
            assert pages > 0
            assert metric(server, "kvtuner_hicache_bytes_total", direction=direction) == pages * 16 * token_bytes
            assert metric(server, "kvtuner_hicache_seconds_total", direction=direction) > 0
        assert metric(server, "kvtuner_hicache_pages_refused_total") == 0
        server.flush()
        assert json.loads(server.get("/v1/loads"))["loads"][0]["num_used_tokens"] == 0
    files = sorted(storage.glob("*.bin"))
    assert {path.stat().st_size for path in files} == {HEADER_BYTES + 16 * token_bytes}
    with serve(folder, *tiers(storage)) as server:  # after SIGKILL
        found = ask_all(server, requests, truth)
        assert found["storage"] > 500
        assert metric(server, "kvtuner_hicache_pages_refused_total") == 0
    spoil(files)
    with serve(folder, *tiers(storage)) as server:
        ask_all(server, requests, truth)
        refused = {fault: metric(server, "kvtuner_hicache_pages_refused_total", fault=fault) for fault in FAULTS}
        assert all(refused.values()), refused
        assert "stored pages are not what they should be and are computed again" in server.log
        found = ask_all(server, requests, truth)
        shutil.rmtree(storage)
        soak(server, requests, truth, 30, seed=1)
        server.post("/flush_cache?timeout=30")
        ask_all(server, requests, truth)
        assert json.loads(server.get("/v1/loads"))["loads"][0]["num_running_reqs"] == 0


def spoil(files: list[Path]) -> None:
    """Every kind of damage, on every file one of them: pages are read in any order, and only until the first fault."""
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        kind = number % 9
        if kind == 0:
            data = data[: HEADER_BYTES // 2]
        elif kind == 1:
            data = data[:-7]
        elif kind == 2:
            data += b"more"
        elif kind == 3:
            data[-(1 + number % 99)] ^= 1 << number % 8
        elif kind == 4:
            data = bytearray(len(data))
        elif kind == 5:
            data[8] ^= 3  # the version
        elif kind == 6:
            data[30] ^= 1  # the identity
        elif kind == 7:
            data = bytearray(files[number - 1].read_bytes()) if number % 2 else bytearray(data)
            data[60] ^= 0 if number % 2 else 1  # the key
        if kind == 8:
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(data)


@torch.no_grad()
def quantized_below(model: Any, profile: Profile, ids: Sequence[int], reused: int, fed: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of the transformers host when `reused` tokens came back from below, and all else is exact."""
    formats = rank_formats(profile, range(profile.geometry.num_layers))
    cache = DynamicCache(config=model.config)
    if reused:
        model(torch.tensor([ids[:reused]]), past_key_values=cache)
        for layer, entry in zip(cache.layers, formats, strict=True):
            for name, side in (("keys", entry.k), ("values", entry.v)):
                states = getattr(layer, name)
                rows = side.pack(states.transpose(1, 2))
                setattr(layer, name, side.unpack(rows, states.dtype).transpose(1, 2))
    logits = [model(torch.tensor([ids[reused:]]), past_key_values=cache).logits[0, -1]]
    for token in fed[:-1]:
        logits.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
    return torch.stack(logits).log_softmax(-1)


@torch.no_grad()
def by_hit(model: Any, profile: Profile, ids: Sequence[int], reused: int) -> torch.Tensor:
    """Log-probabilities after the prompt by the read plan `hit`: the reused prefix quantized, the rest exact."""
    cache = KVTunerCache.from_profile(profile, model.config)
    with cache.reading("hit"):
        model(torch.tensor([ids[:reused]]), past_key_values=cache)
        return model(torch.tensor([ids[reused:]]), past_key_values=cache).logits[0, -1].log_softmax(-1)


def test_an_unquantized_device_pool_reads_what_came_back_as_the_transformers_host_does(
    served: Any, serve: Any, prompts: Any
) -> None:
    folder, _, _ = served
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    flags = (
        "--enable-hierarchical-cache", "--enable-kvtuner-hicache", "--kvtuner-hicache-nbits-key", "4",
        "--kvtuner-hicache-nbits-value", "2", "--kvtuner-hicache-asym", "--kvtuner-hicache-q-group-size", "16",
        "--hicache-ratio", "8", "--page-size", "16", "--enable-cache-report", "--max-total-tokens", "512",
    )  # fmt: skip
    asked = prompts(*range(150, 190, 5), seed=8)
    churn = prompts(*[150] * 8, seed=9)
    with serve(folder, *flags) as server:
        exact = [server.generate([ids], TOKENS, top=320)[0] for ids in asked[:1]]
        profile = uniform_of(config, re.search(r"by profile (sha256:\w+)", server.log))
        for ids in asked[1:]:
            server.generate([ids], TOKENS)
        server.generate(churn, 1)
        found = []
        for ids in asked:
            found.append(server.generate([ids], TOKENS, top=320)[0])
            server.generate(churn, 1)
    assert torch.allclose(
        log_probs(exact[0]), quantized_below(model, profile, asked[0], 0, exact[0]["output_ids"]), atol=1e-4
    )
    hurt = []
    for ids, answer in zip(asked, found, strict=True):
        reused = sources(answer)["host"]
        assert reused == (len(ids) - 1) // 16 * 16
        expected = quantized_below(model, profile, ids, reused, answer["output_ids"])
        assert torch.allclose(log_probs(answer), expected, atol=2e-3)
        assert torch.allclose(log_probs(answer)[0], by_hit(model, profile, ids, reused), atol=2e-3)
        plain = quantized_below(model, profile, ids, 0, answer["output_ids"])
        hurt.append((plain.exp() * (plain - expected)).sum(-1).mean())
    assert torch.stack(hurt).mean() > 1e-3, "quantization must show for this test to show anything"


@pytest.mark.full
@pytest.mark.parametrize("policy", ["write_back", "write_through_selective"])
def test_what_comes_back_again_and_again_was_quantized_once(policy: str, served: Any, serve: Any, prompts: Any) -> None:
    folder, profile, path = served
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    flags = (
        "--kvtuner-profile", str(path), "--kvtuner-hicache-only", "--enable-hierarchical-cache",
        "--hicache-ratio", "1.5", "--hicache-write-policy", policy, "--page-size", "16", "--enable-cache-report",
        "--max-total-tokens", "512",
    )  # fmt: skip
    # More than the host holds, so that it gives up pages all the time.
    asked, order = prompts(*range(150, 198, 8), seed=8), random.Random(0)
    came_back = 0
    with serve(folder, *flags) as server:
        for ids in order.choices(asked, k=150):
            answer = server.generate([ids], 2, top=320)[0]
            found = sources(answer)
            if found["host"] and not found["device"]:
                came_back += 1
                expected = quantized_below(model, profile, ids, found["host"], answer["output_ids"])
                assert torch.allclose(log_probs(answer), expected, atol=2e-4)
    assert came_back > 20


def uniform_of(config: Any, logged: Any) -> Profile:
    """The profile that the flags of the test ask for, which is the one in the log."""
    identity = ModelIdentity(
        id="x", revision=None, config_sha256="sha256:" + "0" * 64, architecture=config.architectures[0], dtype="float32"
    )
    profile = uniform_profile(
        ModelGeometry.from_config(config),
        PrecisionPair(4, 2),
        identity,
        k_group_size=16,
        v_group_size=16,
        symmetric=False,
    )
    assert logged[1] == profile.digest
    return profile


def log_probs(answer: Any) -> torch.Tensor:
    """Of all tokens of the vocabulary, by position."""
    tops = answer["meta_info"]["output_top_logprobs"]
    found = torch.full((len(tops), 320), torch.nan)
    for row, top in zip(found, tops, strict=True):
        row[[token for _, token, _ in top]] = torch.tensor([p for p, _, _ in top])
    assert not found.isnan().any()
    return found


def test_tensor_parallel_ranks_keep_their_own_pages_and_read_no_others(
    served: Any, requests: Any, truth: Any, tiers: Any, serve: Any, profile_of: Any, save_profile: Any, tmp_path: Path
) -> None:
    folder, _, _ = served
    storage, two = tmp_path / "pages", ("--tp-size", "2")
    with serve(folder, *tiers(storage), *two) as server:
        assert soak(server, requests, truth, 60)["host"] > 0
    with serve(folder, *tiers(storage), *two) as server:
        assert ask_all(server, requests, truth)["storage"] > 500
    config = AutoConfig.from_pretrained(folder)
    other = save_profile(profile_of(config, [LayerChoice(8, 8)] * 4))
    with serve(folder, *tiers(storage, profile=other)) as server:
        # Another profile and another number of ranks: nothing on the same storage is theirs.
        answers = [server.generate([ids], TOKENS)[0] for ids in requests]
        assert sum(sources(answer)["storage"] for answer in answers) == 0
        assert metric(server, "kvtuner_hicache_pages_refused_total") == 0


def admin(server: Any, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and answer of an administrator's request."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    request = Request(f"{server.url}{path}", json.dumps(body or {}).encode(), headers, method=method)
    try:
        with urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_storages_that_come_and_go_and_weights_that_change_in_a_running_server(
    served: Any, requests: Any, truth: Any, tiers: Any, serve: Any, model_folder: Any, tmp_path: Path
) -> None:
    folder, _, _ = served
    other = model_folder("llama-gqa", num_hidden_layers=4, seed=7)
    few, right = requests[::6], truth[::6]
    config = json.dumps({"file_storage_path": str(tmp_path / "pages"), "prefetch_threshold": 1})
    path, attach = "/hicache/storage-backend", {
        "hicache_storage_backend_extra_config_json": config, "hicache_storage_prefetch_policy": "wait_complete"
    }  # fmt: skip
    with serve(folder, *tiers(), "--admin-api-key", "secret") as server:

        def flush() -> None:
            assert admin(server, "POST", "/flush_cache?timeout=30")[0] == 200

        def update(model: Path, *, flushes: bool) -> None:
            body = {"model_path": str(model), "flush_cache": flushes}
            assert admin(server, "POST", "/update_weights_from_disk", body)[0] == 200

        ask_all(server, few, right)
        status, answer = admin(server, "PUT", path, {"hicache_storage_backend": "nixl", **attach})
        assert status == 400
        assert "--hicache-storage-backend nixl was never tried with quantized pages" in answer
        assert admin(server, "PUT", path, {"hicache_storage_backend": "file", **attach})[0] == 200
        flush()
        ask_all(server, few, right)
        flush()
        assert ask_all(server, few, right)["storage"] > 100
        files = set((tmp_path / "pages").glob("*.bin"))
        update(other, flushes=False)
        assert "weights change; storage is not used until the cache is flushed" in server.log
        for ids in few:
            server.generate([[*ids, 7]], TOKENS)  # by keys of both weights: anything but a page for later
        assert set((tmp_path / "pages").glob("*.bin")) == files
        flush()
        changed = [server.generate([ids], TOKENS, top=2)[0] for ids in few]
        assert sum(sources(answer)["storage"] for answer in changed) == 0
        assert [each["output_ids"] for each in changed] != [each["output_ids"] for each in right]
        flush()
        assert ask_all(server, few, changed)["storage"] > 100
        update(folder, flushes=True)
        assert ask_all(server, few, right)["storage"] > 100, "pages of the first weights are right again"
        assert metric(server, "kvtuner_hicache_pages_refused_total") == 0
        assert admin(server, "DELETE", path)[0] == 200
        flush()
        assert ask_all(server, few, right)["storage"] == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("page_size", "flags", "variables"),
    [
        (1, ("--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_back"), {}),
        (16, ("--hicache-io-backend", "direct", "--hicache-write-policy", "write_through_selective"), {}),
        (64, ("--hicache-mem-layout", "layer_first", "--hicache-io-backend", "direct"), {}),
        (16, ("--pp-size", "2"), {}),
        (
            16,
            ("--hicache-storage-prefetch-policy", "timeout"),
            {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2"},
        ),
    ],
    ids=["page 1, write_back", "direct, selective", "page 64, layer_first", "PP 2", "slow and failing"],
)
def test_a_thousand_requests_under_eviction(
    page_size: int,
    flags: tuple[str, ...],
    variables: dict[str, str],
    served: Any,
    requests: Any,
    truth: Any,
    tiers: Any,
    serve: Any,
    tmp_path: Path,
) -> None:
    folder, _, _ = served
    with serve(folder, *tiers(tmp_path / "pages", page_size), *flags, **variables) as server:
        found = soak(server, requests, truth, 1000)
        assert found["device"] > 0
        assert found["host"] > 0
    with serve(folder, *tiers(tmp_path / "pages", page_size), *flags, **variables) as server:
        found = ask_all(server, requests, truth)
        assert found["storage"] > 0


@pytest.mark.full
def test_two_nodes(served: Any, requests: Any, truth: Any, tiers: Any, serve: Any, apart: Any, tmp_path: Path) -> None:
    folder, _, _ = served
    for pages in range(2):
        with serve(
            folder, *tiers(tmp_path / "pages"), "--tp-size", "2", places=apart, GLOO_SOCKET_IFNAME="eth0"
        ) as server:
            found = soak(server, requests, truth, 100) if not pages else ask_all(server, requests, truth)
        assert found["storage" if pages else "host"] > 0
