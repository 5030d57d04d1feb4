"""A server under load: many requests of all lengths, SGLang's own benchmark, and the OpenAI client."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil
import pytest
from transformers import AutoConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fixture_types import MixedLayers, ModelFolder, ProfileOf, Prompts, RunProgram, SaveProfile, Serve
    from sglang_server import Server


@pytest.fixture(scope="module")
def folder(model_folder: ModelFolder) -> Path:
    path: Path = model_folder("llama-gqa", num_hidden_layers=3)
    return path


@pytest.fixture(scope="module")
def server(
    folder: Path, profile_of: ProfileOf, mixed_layers: MixedLayers, save_profile: SaveProfile, serve: Serve
) -> Iterator[Server]:
    config = AutoConfig.from_pretrained(folder)
    profile = profile_of(config, mixed_layers(config))
    with serve(folder, "--kvtuner-profile", str(save_profile(profile)), "--page-size", "16") as running:
        yield running


def resident_bytes(server: Server) -> int:
    """Memory of the scheduler processes of this server, which hold the pool."""
    (launcher,) = server.processes
    return sum(process.memory_info().rss for process in psutil.Process(launcher.pid).children(recursive=True))


@pytest.mark.parametrize("num_requests", [80, pytest.param(2000, marks=pytest.mark.full)])
def test_nothing_fails_and_nothing_grows(num_requests: int, server: Server, prompts: Prompts) -> None:
    rng = random.Random(num_requests)
    lengths = [rng.choice((1, 3, 15, 16, 17, 60, 130, 250)) for _ in range(num_requests)]
    requests = list(zip(prompts(*lengths, seed=num_requests), [rng.randint(1, 24) for _ in lengths], strict=True))

    def ask(request: tuple[list[int], int]) -> bool:
        ids, num_tokens = request
        (answer,) = server.generate([ids], num_tokens)
        return len(answer["output_ids"]) == num_tokens

    middle = num_requests // 2
    with ThreadPoolExecutor(12) as pool:
        first = list(pool.map(ask, requests[:middle]))
        before = resident_bytes(server)
        second = list(pool.map(ask, requests[middle:]))
    assert all(first + second)
    assert resident_bytes(server) < 1.1 * before
    server.flush()
    assert json.loads(server.get("/v1/loads"))["loads"][0]["num_used_tokens"] == 0


def test_sglangs_own_benchmark_runs_against_it(
    server: Server, folder: Path, run_program: RunProgram, tmp_path: Path
) -> None:
    out = tmp_path / "result.jsonl"
    done = run_program(
        "-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url",
        server.url, "--model", str(folder), "--dataset-name", "random-ids",
        "--num-prompts", "10", "--random-input-len", "40", "--random-output-len", "8", "--request-rate", "inf",
        "--output-file", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(out.read_text())["completed"] == 10


def test_the_openai_client_is_answered(server: Server) -> None:
    import openai  # a second to import, which every collection of tests would take

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(model="tiny", prompt="The baker counts", max_tokens=5, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    pieces = list(client.completions.create(model="tiny", prompt="The fox", max_tokens=4, temperature=0, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces)
