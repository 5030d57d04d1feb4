"""An unquantized device pool over quantized tiers: what comes back differs by the quantizer, once."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvtuner.exported_configs.profile.build import uniform_profile
from kvtuner.exported_configs.profile.records import ModelIdentity
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair, ScaleLayout
from kvtuner.runtime_loader.row_format import rank_formats
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fixture_types import Json, Prompts, Serve

    from kvtuner.exported_configs.profile.profile import Profile

TOKENS = 8


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
    served: tuple[Path, Profile, Path],
    sources: Callable[[Json], dict[str, int]],
    metric: Callable[..., float],
    serve: Serve,
    prompts: Prompts,
) -> None:
    folder, _, _ = served
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    flags = (
        "--enable-hierarchical-cache", "--enable-kvtuner-hicache", "--kvtuner-hicache-nbits-key", "4",
        "--kvtuner-hicache-nbits-value", "3", "--kvtuner-hicache-asym", "--kvtuner-hicache-q-group-size", "16",
        "--hicache-ratio", "8", "--page-size", "16", "--enable-cache-report", "--max-total-tokens", "512",
        "--enable-metrics",
    )  # fmt: skip
    requests = prompts(*range(150, 190, 5), seed=8)
    churn = prompts(*[150] * 8, seed=9)
    with serve(folder, *flags) as server:
        exact = [server.generate([ids], TOKENS, top=320)[0] for ids in requests[:1]]
        profile = uniform_of(config, re.search(r"by profile (sha256:\w+)", server.log))
        for ids in requests[1:]:
            server.generate([ids], TOKENS)
        server.generate(churn, 1)
        found = []
        for ids in requests:
            found.append(server.generate([ids], TOKENS, top=320)[0])
            server.generate(churn, 1)
        for direction, work in (("backup", "quantize"), ("load", "dequantize")):
            whole = metric(server, "kvtuner_hicache_seconds_total", direction=direction)
            assert 0 < metric(server, f"kvtuner_hicache_{work}_seconds_total") < whole
    assert torch.allclose(
        log_probs(exact[0]), quantized_below(model, profile, requests[0], 0, exact[0]["output_ids"]), atol=1e-4
    )
    hurt = []
    for ids, answer in zip(requests, found, strict=True):
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
def test_what_comes_back_again_and_again_was_quantized_once(
    policy: str,
    served: tuple[Path, Profile, Path],
    sources: Callable[[Json], dict[str, int]],
    serve: Serve,
    prompts: Prompts,
) -> None:
    folder, profile, path = served
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    flags = (
        "--kvtuner-profile", str(path), "--kvtuner-hicache-only", "--enable-hierarchical-cache",
        "--hicache-ratio", "1.5", "--hicache-write-policy", policy, "--page-size", "16", "--enable-cache-report",
        "--max-total-tokens", "512",
    )  # fmt: skip
    # More than the host holds, so that it gives up pages all the time.
    requests, order = prompts(*range(150, 198, 8), seed=8), random.Random(0)
    came_back = 0
    with serve(folder, *flags) as server:
        for ids in order.choices(requests, k=150):
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
        PrecisionPair(4, 3),
        identity,
        k_layout=ScaleLayout(16),
        v_layout=ScaleLayout(16),
        symmetric=False,
    )
    assert logged[1] == profile.digest
    return profile


def log_probs(answer: Any) -> torch.Tensor:
    """Return log-probabilities of all tokens of the vocabulary, by position."""
    tops = answer["meta_info"]["output_top_logprobs"]
    found = torch.full((len(tops), 320), torch.nan)
    for row, top in zip(found, tops, strict=True):
        row[[token for _, token, _ in top]] = torch.tensor([p for p, _, _ in top])
    assert not found.isnan().any()
    return found
