"""Servers with host tiers, what they are asked, and what each request is answered when nothing is cached."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest
from transformers import AutoConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from fixture_types import MixedLayers, ModelFolder, ProfileOf, Prompts, SaveProfile, Serve
    from sglang_server import Server

    from kvtuner.exported_configs.profile.profile import Profile

TOKENS = 8
TIE = 0.01
"""Nats between the two likeliest tokens that a flipped code may turn round."""
SMALL = ("--max-total-tokens", "512", "--max-running-requests", "4", "--chunked-prefill-size", "64")
"""A device pool that evicts all the time."""


@pytest.fixture(scope="session")
def served(
    model_folder: ModelFolder, profile_of: ProfileOf, mixed_layers: MixedLayers, save_profile: SaveProfile
) -> tuple[Path, Profile, Path]:
    """A model, its mixed profile with short words of keys, and the profile's file."""
    folder = model_folder("llama-gqa", num_hidden_layers=4)
    config = AutoConfig.from_pretrained(folder)
    profile = profile_of(config, mixed_layers(config), words=(16, 32), half_groups=True)
    return folder, profile, save_profile(profile)


@pytest.fixture(scope="session")
def tiers(served: tuple[Path, Profile, Path]) -> Callable[..., tuple[str, ...]]:
    """`tiers(storage=None, page_size=16, profile=None)`: flags of a packed pool with host tiers, by `cache` reading."""

    def flags(storage: Path | None = None, page_size: int = 16, profile: Path | None = None) -> tuple[str, ...]:
        config = json.dumps({"file_storage_path": str(storage), "prefetch_threshold": 1})
        below = ("--hicache-storage-backend", "file", "--hicache-storage-backend-config", config) if storage else ()
        wait = ("--hicache-storage-prefetch-policy", "wait_complete") if storage else ()
        return (
            "--kvtuner-profile", str(profile or served[2]), "--kvtuner-attend", "cache", "--enable-hierarchical-cache",
            "--hicache-ratio", "1.5", "--page-size", str(page_size), "--enable-cache-report", "--enable-metrics",
            *SMALL, *below, *wait,
        )  # fmt: skip

    return flags


@dataclass(frozen=True)
class Asking:
    """Requests and what each is answered without a prefix cache or chunks, reading the cache."""

    requests: list[list[int]]
    truth: list[Any]

    def some(self, step: int) -> Asking:
        """Every so many of them."""
        return Asking(self.requests[::step], self.truth[::step])

    def answered(self, server: Server) -> Asking:
        """Return the same requests with this server's answers for the truth."""
        return Asking(self.requests, [server.generate([ids], TOKENS, top=2)[0] for ids in self.requests])

    def each(self, server: Server) -> dict[str, int]:
        """Ask each once, one after the other, and check the answers; tokens by where they came from."""
        found = []
        for ids, single in zip(self.requests, self.truth, strict=True):
            answer = server.generate([ids], TOKENS)[0]
            assert_same(answer, single)
            found.append(self.sources(answer))
        return total(found)

    def soak(self, server: Server, count: int, seed: int = 0) -> dict[str, int]:
        """Ask at random, four at a time, hang up on every tenth, and check every answer."""
        order = random.Random(seed).choices(range(len(self.requests)), k=count)

        def ask(number: int) -> dict[str, int]:
            index = order[number]
            if number % 10 == 9:
                hang_up(server, self.requests[index])
            answer = server.generate([self.requests[index]], TOKENS)[0]
            assert_same(answer, self.truth[index])
            return self.sources(answer)

        with ThreadPoolExecutor(4) as pool:
            return total(pool.map(ask, range(count)))

    def overflowed(self, server: Server, page_size: int) -> bool:
        """Whether more pages went down than fit there: some were given up."""
        down = self.metric(server, "kvtuner_hicache_pages_total", direction="backup")
        return down * page_size > self.metric(server, "kvtuner_hicache_capacity_tokens")

    @staticmethod
    def sources(answer: Any) -> dict[str, int]:
        """Tokens of a prompt by where they were found."""
        details = answer["meta_info"].get("cached_tokens_details") or {}
        return {place: details.get(place, 0) for place in ("device", "host", "storage")}

    @staticmethod
    def metric(server: Server, name: str, **labels: str) -> float:
        """Sum of a metric over what labels leave open."""
        found = 0.0
        for line in server.get("/metrics").splitlines():
            if re.match(rf"{name}\b", line) and all(f'{key}="{value}"' in line for key, value in labels.items()):
                found += float(line.rsplit(" ", 1)[1])
        return found


def total(found: Iterable[dict[str, int]]) -> dict[str, int]:
    counts = list(found)
    return {place: sum(each[place] for each in counts) for place in ("device", "host", "storage")}


def assert_same(answer: Any, single: Any) -> None:
    """Assert the same tokens, unless the two likeliest were all but equal, and equal log-probabilities until then."""
    for position, (found, expected) in enumerate(zip(answer["output_ids"], single["output_ids"], strict=True)):
        (first, _, _), (second, _, _) = single["meta_info"]["output_top_logprobs"][position]
        if found != expected:
            assert first - second < TIE, (position, first, second)
            return
        (mine, _, _), (its, _, _) = (each["meta_info"]["output_token_logprobs"][position] for each in (answer, single))
        assert abs(mine - its) < TIE, (position, mine, its)


def hang_up(server: Server, ids: list[int]) -> None:
    """Leave while an answer is being made: its pages may be on their way up or down."""
    sampling = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
    body = json.dumps({"input_ids": ids, "stream": True, "sampling_params": sampling}).encode()
    request = Request(f"{server.url}/generate", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        answer.readline()


@pytest.fixture(scope="session")
def sources() -> Callable[[Any], dict[str, int]]:
    """Tokens of an answer's prompt by where they were found."""
    return Asking.sources


@pytest.fixture(scope="session")
def metric() -> Callable[..., float]:
    """`metric(server, name, **labels)`: sum of a metric over what labels leave open."""
    return Asking.metric


@pytest.fixture(scope="session")
def asking(served: tuple[Path, Profile, Path], prompts: Prompts, serve: Serve) -> Asking:
    """Prompts that share beginnings of many lengths: three stems, cut everywhere, with tails of their own."""
    stems = prompts(180, 200, 220)
    tails = prompts(*[1 + index % 23 for index in range(48)], seed=5)
    requests = [stems[index % 3][: 20 + 4 * index] + tail for index, tail in enumerate(tails)]
    folder, _, profile = served
    single = ("--disable-radix-cache", "--max-running-requests", "1", "--chunked-prefill-size", "-1")
    with serve(folder, "--kvtuner-profile", str(profile), *single, "--kvtuner-attend", "cache") as server:
        return Asking(requests, []).answered(server)
