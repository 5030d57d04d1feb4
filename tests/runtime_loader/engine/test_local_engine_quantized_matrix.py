"""An engine with a profile reads as `KVTunerCache` does, on every architecture and with all options together.

Every pair of options runs, but for more than 600 steps; those and all products are marked `full`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from option_rows.covering_rows import every_row, name_of
from option_rows.engine_rows import CHOICES, answered, every_pair, memory_of, options_of

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import NO_WINDOW, ExactWindow
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fixture_types import ProfileOf
    from option_rows.covering_rows import Row

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.read_plan_names import ReadPlanName
    from kvtuner.runtime_loader.engine.generation import Completion
    from kvtuner.runtime_loader.engine.local_engine import LocalEngine

    Apart = Callable[[Row, str], list[Completion]]

LAYERS = [LayerQuantization(4, 3), LayerQuantization(16, 8), LayerQuantization(8, 4)]
WINDOWS = {"none": NO_WINDOW, "recent": ExactWindow(6), "sinks": ExactWindow(5, 3)}
CACHE = {**CHOICES, "window": tuple(WINDOWS)}
FRESH = {**CACHE, "chunk_tokens": (8192,), "at_once": ("one", "two", "all"), "hits": (False,)}
"""Options under which every prompt is one chunk."""
NUM_TOP = 100
# Rounding of 1e-7 may flip a code, and by that a log-probability by some hundredths; reads that differ flip many.
MEAN_KL = 2e-4
TIE = 0.1


def depends_on_no_history(row: Row) -> bool:
    """Whether a row's answers are the same without hits: an exact window has copies of what was computed alone."""
    return not row["hits"] or row["window"] == "none"


def by_the_cache(model: Any, profile: Profile, answer: Completion, plan: ReadPlanName) -> torch.Tensor:
    """The log-probabilities of an answer's tokens, [tokens, vocab_size]; by `cache` of one chunk, whose cuts are free.

    By another plan the prompt is a chunk, and each token of the answer.
    """
    tokens = [*answer.prompt_token_ids, *answer.token_ids[:-1]]
    num_prompt, num_new = len(answer.prompt_token_ids), len(answer.token_ids)
    cuts = [tokens] if plan == "cache" else [tokens[:num_prompt], *([token] for token in tokens[num_prompt:])]
    cache = KVTunerCache.from_profile(profile, model.config, plan)
    with torch.no_grad(), cache.attending(model, in_place=False):
        logits = [model(torch.tensor([cut]), past_key_values=cache, logits_to_keep=num_new).logits[0] for cut in cuts]
    return torch.cat(logits)[-num_new:].log_softmax(-1)


def agrees(answer: Completion, wanted: torch.Tensor) -> bool:
    """Whether an answer has the log-probabilities that are wanted, and each token is the likeliest, or tied with it."""
    ids = torch.tensor([[token for token, _ in each.top] for each in answer.logprobs])
    found = torch.tensor([[logprob for _, logprob in each.top] for each in answer.logprobs])
    likely = wanted.gather(1, ids)
    mean_kl = float((likely.exp() * (likely - found)).sum(-1).mean())
    chosen = wanted.gather(1, torch.tensor(answer.token_ids).unsqueeze(1))[:, 0]
    return abs(mean_kl) < MEAN_KL and bool((wanted.amax(-1) - chosen < TIE).all())


@pytest.fixture
def apart(
    families: Sequence[str], models: Any, prompt: Any, profile_of: ProfileOf, engine_of: Callable[..., LocalEngine]
) -> Apart:
    """`apart(row, attend)`: answers of an engine with these options that read otherwise than the transformers cache."""

    def run(row: Row, attend: str) -> list[Completion]:
        model = models(families[row["family"]])
        layers = LAYERS[: model.config.num_hidden_layers]
        profile = profile_of(model.config, layers, window=WINDOWS[row["window"]])
        options = {**options_of(row), "attend": attend}
        memory = memory_of(row, engine_of(model, None, profile, **options).pool.shape)
        engine = engine_of(model, None, profile, kv_memory=memory, **options)
        answers = answered(row, engine, prompt, logprobs=NUM_TOP)
        engine.close()
        plan: ReadPlanName = "cache" if attend == "cache" else "decode"
        return [answer for answer in answers if not agrees(answer, by_the_cache(model, profile, answer, plan))]

    return run


@pytest.mark.parametrize("row", every_pair(CACHE, depends_on_no_history))
def test_cache_reading_is_the_same_by_every_pair_of_options(row: Row, apart: Apart) -> None:
    assert apart(row, "cache") == []


@pytest.mark.parametrize("row", every_pair(FRESH))
def test_fresh_reading_of_whole_prompts_is_the_same_by_every_pair_of_options(row: Row, apart: Apart) -> None:
    assert apart(row, "fresh") == []


SHARED = {name: CACHE[name] for name in ("family", "attention", "load", "page_size", "window")}


@pytest.mark.full
@pytest.mark.parametrize("shared", every_row(SHARED), ids=name_of)
def test_reading_is_the_same_by_all_options_together(shared: Row, apart: Apart) -> None:
    fixed = {name: (value,) for name, value in shared.items()}
    for row in every_row({**CACHE, **fixed}, depends_on_no_history):
        assert apart(row, "cache") == []
    for row in every_row({**FRESH, **fixed}):
        assert apart(row, "fresh") == []
