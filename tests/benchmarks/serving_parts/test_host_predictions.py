"""The transformers host knows a server that reads what it should from one that does not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from uncached_forward import uncached_logits

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from serving_parts.host_predictions import Answer, Host  # noqa: E402
from serving_parts.served_demo import PROFILE, without_window  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from kvtuner.calibration.model_loading import DEMO_MODEL  # noqa: E402
from kvtuner.exported_configs.profile.load import load_profile  # noqa: E402

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile

PROMPT = torch.randint(2, 1000, (90,), generator=torch.Generator().manual_seed(4)).tolist()
TOKENS = [7, 300, 12, 9, 41]
CACHED = 40


@pytest.fixture(scope="module")
def profile() -> Profile:
    return without_window(load_profile(PROFILE))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return loaded.eval()


@torch.no_grad()
def answered(model: PreTrainedModel, profile: Profile | None, cached: int, read_again: int) -> Answer:
    """What a server answers that finds `read_again` tokens of the prompt as they are stored, and says `cached`."""
    tokens = [*PROMPT, *TOKENS[:-1]]
    exact = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for chunk in (slice(0, read_again), slice(read_again, len(PROMPT))):
        exact[chunk, chunk] = True
    if profile is None:
        exact[:] = True
    specs: list[dict[str, Any]] = [
        {side: profile.quant_spec(layer, side) if profile else None for side in ("k", "v")}
        for layer in range(model.config.num_hidden_layers)
    ]
    logits = uncached_logits(model, torch.tensor([tokens]), specs, exact)[0, len(PROMPT) - 1 :]
    return Answer(PROMPT, TOKENS, logits.double().log_softmax(-1), cached)


@pytest.mark.parametrize("cached", [0, CACHED])
def test_a_server_that_reads_what_it_should_is_within_the_limit(
    cached: int, model: PreTrainedModel, profile: Profile
) -> None:
    found = Host(DEMO_MODEL, profile, torch.float32).divergence([answered(model, profile, cached, cached)])
    assert abs(found.server) <= 1e-5 < 1e-3 < found.own
    assert found.server <= found.limit and found.rounding == 0


def test_a_server_that_reads_other_numbers_is_not(model: PreTrainedModel, profile: Profile) -> None:
    host = Host(DEMO_MODEL, profile, torch.float32)
    wrong = [
        answered(model, None, 0, 0),  # exactly, without a profile
        answered(model, profile, CACHED, 0),  # the prefix as if it were new
        answered(model, profile, 0, CACHED),
    ]
    for answer in wrong:
        found = host.divergence([answer])
        assert found.server > 2 * found.limit, found


def test_rounding_to_the_served_dtype_is_allowed_for(model: PreTrainedModel, profile: Profile) -> None:
    right, exact = (answered(model, each, 0, 0) for each in (profile, None))
    host = Host(DEMO_MODEL, profile, torch.bfloat16)
    assert host.divergence([right]).rounding > 1e-7
    assert host.divergence([right]).server <= host.divergence([right]).limit < host.divergence([exact]).server


def test_an_answer_without_some_predictions_is_not_within_any_limit(profile: Profile) -> None:
    answered = {"output_ids": [5], "meta_info": {"output_top_logprobs": [[[-1.0, 5, None]]], "cached_tokens": 0}}
    found = Host(DEMO_MODEL, profile, torch.float32).divergence([Answer.of(PROMPT, answered, 1024)])
    assert not found.server <= found.limit
