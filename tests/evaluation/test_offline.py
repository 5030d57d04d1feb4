"""Answers on the transformers host: those of `generate`, whatever was asked before and wherever a context begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvtuner.errors import PrecisionError
from kvtuner.evaluation.offline import Offline
from kvtuner.evaluation.questions import Problem, Question
from kvtuner.evaluation.subjects import Subject, named, of_profile
from kvtuner.exported_configs.build import LayerChoice
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.transformers_cache import READ_PLANS, KVTunerCache

CONTEXT = "a table that says nothing of what is asked, but a model says something\n"
ASKED = ("one", "and two", "one")


@pytest.fixture(scope="module")
def ways(load_tiny: Any, profile_of: Any) -> dict[str, Subject]:
    loaded = load_tiny("llama-gqa")
    profile = profile_of(loaded.shape.config, [LayerChoice(4, 2), LayerChoice(8, 4), LayerChoice(2, 16)])
    return {each: named(each, loaded.shape) for each in ("bf16", "fp8", "K4V2")} | {"own": of_profile("own", profile)}


def asking(*texts: str) -> Problem:
    return Problem(CONTEXT, tuple(Question(text, "12345") for text in texts))


@pytest.mark.parametrize("read_plan", READ_PLANS)
def test_answers_do_not_depend_on_what_was_asked_before(read_plan: Any, load_tiny: Any, ways: Any) -> None:
    host = Offline(load_tiny("llama-gqa"), read_plan)
    for way in ways.values():
        found = host.answers(way, asking(*ASKED))
        assert found == tuple(host.answers(way, asking(text))[0] for text in ASKED)
        assert found[0] == found[2]


@pytest.mark.parametrize("name", ["bf16", "fp8", "K4V2", "own"])
def test_answers_are_those_of_generate(name: str, load_tiny: Any, model_folder: Any, ways: Any) -> None:
    """By transformers' own loop and attention, prompt and question in chunks of their own."""
    loaded = load_tiny("llama-gqa")
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama-gqa"), dtype=torch.float32).eval()
    way, tokenizer = ways[name], loaded.tokenizer
    for text in ASKED:
        context, question = (tokenizer(each, return_tensors="pt", add_special_tokens=first).input_ids
                             for each, first in ((CONTEXT, True), (text, False)))  # fmt: skip
        cache = {"bf16": lambda: DynamicCache(config=model.config), "fp8": lambda: KVTunerCache.fp8(model.config)}.get(
            name, lambda: KVTunerCache.from_profile(way.profile, model.config)
        )()
        with torch.no_grad():
            model(context, past_key_values=cache)
            whole = torch.cat((context, question), dim=1)
            count = len(tokenizer("12345", add_special_tokens=False).input_ids) + 1
            said = model.generate(whole, past_key_values=cache, max_new_tokens=count, do_sample=False)
        expected = tokenizer.decode(said[0, whole.shape[1] :], skip_special_tokens=True)
        assert Offline(loaded, "decode").answers(way, asking(text)) == (expected,)


def test_exact_answers_are_the_same_wherever_a_context_begins(load_tiny: Any, ways: Any) -> None:
    host = Offline(load_tiny("llama-gqa"), "decode")
    steps = []

    def logits(offset: int) -> torch.Tensor:
        cache = ways["bf16"].cache(host._model.config, "decode")
        steps.append(host._step([5, 6, 7, 8], cache, offset))
        return host._step([9], cache, offset)

    assert torch.allclose(logits(0), logits(300), atol=1e-4), "rotary positions are relative"
    quantized = [host._step([9, 3, 5, 8], ways["K4V2"].cache(host._model.config, "cache"), at) for at in (0, 300)]
    assert not torch.allclose(*quantized, atol=1e-4), "but keys are rotated before they are quantized"


def test_ways_take_the_bytes_that_their_caches_hold(load_tiny: Any, ways: Any) -> None:
    loaded = load_tiny("llama-gqa")
    for name in ("fp8", "K4V2"):
        cache = ways[name].cache(loaded.shape.config, "decode")
        with torch.no_grad():
            loaded.model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
        assert cache.stored_bytes == 3 * ways[name].bytes_per_token
    assert ways["own"].contestant.specs[0].k == QuantSpec(4, group_size=loaded.shape.geometry.head_dim)


@pytest.mark.parametrize("name", ["K16V16", "int4", "K3V3"])
def test_ways_that_there_are_not(name: str, load_tiny: Any) -> None:
    with pytest.raises(PrecisionError, match=name):
        named(name, load_tiny("llama-gqa").shape)
