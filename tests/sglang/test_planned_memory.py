"""A plan gives weights and cache the share that SGLang gives them, and counts the tokens that a server would have."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import AutoConfig

from kvtuner.evaluation.cache_scheme import RankLayout
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.geometry import ModelGeometry
from kvtuner.pipeline.planning.gpus import GPUS
from kvtuner.pipeline.planning.server_memory import CacheCost, ServerMemory
from kvtuner.pipeline.planning.window_cost import APART, PART_SHARE
from kvtuner.precision import GIB, ExactWindow

if TYPE_CHECKING:
    from fixture_types import ModelFolder, ProfileOf, RunProgram, SaveProfile, Serve

PROGRAM = Path(__file__).parent / "programs" / "memory_program.py"
RANKS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (4, 2))
RESERVES = [
    (memory, *ranks, requests)
    for memory, ranks, requests in product([gpu.memory_mib for gpu in GPUS], RANKS, (None, 4, 100))
]
LLAMA = CacheCost(65_536 * 17 // 64, 2_101_248, 65_536 * 17 // 64, 2_101_248)
STAGES = CacheCost(9_000, 700_000, 17_000, 1_300_000, 20 << 20)
EXACT = CacheCost(65_536, 0, 65_536, 0)
POOLS = [
    (available, context, requests, cost)
    for available, context, requests, cost in product(
        (GIB // 16, 2 * GIB, 58 * GIB), (512, 32_768, 131_072), (None, 8, 200), (LLAMA, STAGES, EXACT)
    )
    if not (requests == 200 and available < 58 * GIB)  # which a server refuses
]


PARTS = [(GIB // 16, 700, 3 * 256), (2 * GIB + 7, 9_216, 24_576), (58 * GIB, 12_345, 24_576), (58 * GIB, 49_152, 1_024)]
"""The bytes available, and those of a token in full layers and in those with a window."""


def test_the_share_of_weights_and_cache_and_the_pool_of_every_scheme_are_sglangs_own(run_program: RunProgram) -> None:
    pools = [(available, context, requests, *cost) for available, context, requests, cost in POOLS]
    done = run_program(str(PROGRAM), json.dumps({"reserves": RESERVES, "pools": pools, "parts": PARTS}))
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    for (memory, tp_size, pp_size, requests), fraction in zip(RESERVES, answers["fractions"], strict=True):
        server = ServerMemory(memory, 0, 4096, tp_size, pp_size, requests)
        assert server.static_fraction == fraction, (memory, tp_size, pp_size, requests)
    for (available, context, requests, cost), (tokens, slots) in zip(POOLS, answers["pools"], strict=True):
        server = with_pool(available, context, requests)
        assert server.tokens(cost) == tokens, (available, context, requests, cost)
        assert server.request_slots(tokens, cost) == slots, (available, context, requests, cost)
    assert answers["in_parts"] == sorted(APART & {*answers["in_parts"]})
    assert {*answers["in_parts"]} >= {"GptOssForCausalLM", "Gemma4ForConditionalGeneration", "MiMoV2FlashForCausalLM"}
    for (available, full, window), tokens in zip(PARTS, answers["parts"], strict=True):
        cost = CacheCost(full + PART_SHARE * window, 0, full, 0)
        assert with_pool(available, 32_768, None).tokens(cost) == tokens, (available, full, window)


def with_pool(num_bytes: int, context_length: int, requests: int | None) -> ServerMemory:
    """A server whose weights leave so many bytes."""
    empty = ServerMemory(143_771, 0, context_length, max_running_requests=requests)
    server = replace(empty, weights_bytes=empty.pool_bytes - num_bytes)
    assert server.pool_bytes == num_bytes
    return server


@pytest.mark.slow
def test_a_server_has_the_tokens_of_the_plan(
    serve: Serve, model_folder: ModelFolder, profile_of: ProfileOf, save_profile: SaveProfile
) -> None:
    folder, window = model_folder("llama-gqa", num_hidden_layers=4), ExactWindow(32)
    config = AutoConfig.from_pretrained(folder)
    profile = profile_of(config, [LayerQuantization(4, 4)] * 4, window=window)
    flags = ("--max-total-tokens", "100000000", "--mem-fraction-static", "0.1", "--max-running-requests", "24")
    with serve(folder, "--kvtuner-profile", str(save_profile(profile)), "--dtype", "bfloat16", *flags) as server:
        log = server.log
    line = r"([\d,]+) bytes are available for the KV cache: ([\d,]+) tokens, beside ([\d,]+) bytes for the exact copies"
    match = re.search(line, log)
    assert match is not None
    rows, tokens, copies = (int(text.replace(",", "")) for text in match.groups())
    ranks = RankLayout.of(ModelGeometry.from_config(config))
    token, slot = ranks.bytes_per_token(profile.pairs), ranks.window_bytes(profile.pairs, window)
    planned = with_pool(rows + copies, config.max_position_embeddings, 24)
    assert planned.tokens(CacheCost(token, slot, token, slot)) == tokens > 100_000
    assert copies == 25 * slot
