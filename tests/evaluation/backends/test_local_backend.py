"""Answers on the transformers backend: those of `generate`, whatever was asked before and wherever a context begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvtuner.calibration.model_loading import ModelSource, read_shape
from kvtuner.errors import NonFiniteActivationError, PrecisionError, UnsupportedModelError
from kvtuner.evaluation.backends.local_backend import LocalBackend
from kvtuner.evaluation.cache_scheme import CacheScheme, ProfileScheme
from kvtuner.evaluation.scheme_registry import named_scheme
from kvtuner.evaluation.tasks.recall_and_needles import Problem, Question
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import ExactWindow
from kvtuner.quant import QuantSpec
from kvtuner.read_plan_names import READ_PLANS
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from fixture_types import Json, LoadTiny, ModelFolder, ProfileOf

    Schemes = dict[str, CacheScheme]

CONTEXT = "a table that says nothing of what is asked, but a model says something\n"
ASKED = ("one", "and two", "one")


@pytest.fixture(scope="module")
def schemes(load_tiny: LoadTiny, profile_of: ProfileOf) -> Schemes:
    loaded = load_tiny("llama-gqa")
    profile = profile_of(
        loaded.shape.config, [LayerQuantization(4, 2), LayerQuantization(8, 4), LayerQuantization(2, 16)]
    )
    return {each: named_scheme(each, loaded.shape) for each in ("bf16", "fp8", "K4V2")} | {
        "own": ProfileScheme.of("own", profile)
    }


def asking(*texts: str) -> Problem:
    return Problem(CONTEXT, tuple(Question(text, "123") for text in texts))


@pytest.mark.parametrize("read_plan", READ_PLANS)
def test_answers_do_not_depend_on_what_was_asked_before(read_plan: Any, load_tiny: LoadTiny, schemes: Schemes) -> None:
    for scheme in schemes.values():
        backend = LocalBackend(load_tiny("llama-gqa"), scheme, read_plan)
        answers = backend.answers(asking(*ASKED))
        assert answers == [backend.answers(asking(text))[0] for text in ASKED]
        assert answers[0] == answers[2]


@pytest.mark.parametrize("read_plan", ["decode", "cache"])
@pytest.mark.parametrize("window", [ExactWindow(6), ExactWindow(3, 2), ExactWindow(0, 4)], ids=str)
def test_answers_beside_a_window_do_not_depend_on_what_was_asked_before(
    window: ExactWindow, read_plan: Any, load_tiny: LoadTiny, profile_of: ProfileOf
) -> None:
    loaded = load_tiny("llama-gqa")
    profile = profile_of(loaded.shape.config, [LayerQuantization(2, 2)] * 3, window=window)
    backend = LocalBackend(loaded, ProfileScheme.of("own", profile), read_plan)
    answers = backend.answers(asking(*ASKED))
    assert answers == [backend.answers(asking(text))[0] for text in ASKED]
    ids = list(range(5, 25))
    likelihood, _ = backend.log_likelihood(ids[:9], ids[9:])
    without = ProfileScheme.of("own", profile_of(loaded.shape.config, [LayerQuantization(2, 2)] * 3))
    assert likelihood != LocalBackend(loaded, without, read_plan).log_likelihood(ids[:9], ids[9:])[0]
    assert backend.continuation(ids, 6) == LocalBackend(
        loaded, ProfileScheme.of("own", profile), read_plan
    ).continuation(ids, 6)


@pytest.mark.parametrize(
    "model_fields", [{"name": "llama-gqa"}, {"name": "qwen2-bias", "adds_bos": True}], ids=["", "bos"]
)
@pytest.mark.parametrize("name", ["bf16", "fp8", "K4V2"])
def test_answers_are_those_of_generate(
    name: str, model_fields: Json, load_tiny: LoadTiny, model_folder: ModelFolder
) -> None:
    """The expected texts are of transformers' own loop and attention, prompt and question in chunks of their own."""
    loaded = load_tiny(**model_fields)
    model = AutoModelForCausalLM.from_pretrained(model_folder(**model_fields), dtype=torch.float32).eval()
    scheme, tokenizer = named_scheme(name, loaded.shape), loaded.tokenizer
    for text in ASKED:
        context = tokenizer(CONTEXT, return_tensors="pt").input_ids
        whole = tokenizer(CONTEXT + text, return_tensors="pt").input_ids
        assert torch.equal(whole[:, : context.shape[1]], context)
        cache = {"bf16": lambda: DynamicCache(config=model.config), "fp8": lambda: KVTunerCache.fp8(model.config)}.get(
            name, lambda: KVTunerCache.from_profile(scheme.profile, model.config)
        )()
        with torch.no_grad():
            model(context, past_key_values=cache)
            generated = model.generate(whole, past_key_values=cache, max_new_tokens=5, do_sample=False)
        expected = tokenizer.decode(generated[0, whole.shape[1] :], skip_special_tokens=True)
        (answer,) = LocalBackend(loaded, scheme, "decode").answers(asking(text))
        assert expected.startswith(answer)
        assert answer == expected or Question(text, "123").is_answered(answer)


def test_exact_answers_are_the_same_wherever_a_context_begins(load_tiny: LoadTiny, schemes: Schemes) -> None:
    def logits(name: str, read_plan: Any, offset: int) -> torch.Tensor:
        backend = LocalBackend(load_tiny("llama-gqa"), schemes[name], read_plan)
        return backend._step([9, 3, 5, 8], schemes[name].cache(backend._model.config, read_plan, 512), offset)

    assert torch.allclose(logits("bf16", "decode", 0), logits("bf16", "decode", 300), atol=1e-4), (
        "positions are relative"
    )
    assert not torch.allclose(logits("K4V2", "cache", 0), logits("K4V2", "cache", 300), atol=1e-4), (
        "but keys are rotated before they are quantized"
    )


def test_schemes_take_the_bytes_that_their_caches_hold(load_tiny: LoadTiny, schemes: Schemes) -> None:
    loaded = load_tiny("llama-gqa")
    for name in ("fp8", "K4V2"):
        cache = schemes[name].cache(loaded.shape.config, "decode", 512)
        with torch.no_grad():
            loaded.model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
        assert cache.stored_bytes == 3 * schemes[name].bytes_per_token
    assert schemes["own"].specs[0].k == QuantSpec(4, group_size=loaded.shape.geometry.head_dim)


@pytest.mark.parametrize("name", ["K16V16", "int4", "K5V5"])
def test_schemes_that_there_are_not(name: str, load_tiny: LoadTiny) -> None:
    with pytest.raises(PrecisionError, match=name):
        named_scheme(name, load_tiny("llama-gqa").shape)


def test_windows_that_cover_the_context_are_none(model_folder: ModelFolder) -> None:
    shape = read_shape(ModelSource(str(model_folder("mistral-no-window", sliding_window=128)), context_length=128))
    for name in ("fp8", "K8V8"):
        scheme = named_scheme(name, shape)
        assert scheme.cache(shape.config, "decode", 128) is not None
        with pytest.raises(UnsupportedModelError, match="window of 128"):
            scheme.cache(shape.config, "decode", 129)


def test_logits_that_are_no_numbers_are_no_wrong_answers(
    load_tiny: LoadTiny, schemes: Schemes, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(load_tiny("llama-gqa"), schemes["fp8"], "decode")
    monkeypatch.setattr(backend._model.lm_head, "forward", lambda x: x.new_full((*x.shape[:-1], 320), torch.nan))
    with pytest.raises(NonFiniteActivationError, match="fp8"):
        backend.answers(asking("one"))


def test_arithmetic_begins_where_it_is_asked_to(load_tiny: LoadTiny, schemes: Schemes) -> None:
    seen = []
    backend = LocalBackend(load_tiny("llama-gqa"), schemes["bf16"], "decode")
    handle = backend._model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(int(kwargs["position_ids"][0, 0])), with_kwargs=True
    )
    backend.answers(asking("one"), offset=100)
    handle.remove()
    assert seen[0] == 100
    assert seen[1] == 100 + len(load_tiny("llama-gqa").tokenizer(CONTEXT).input_ids)
