"""An engine for a command: the model that flags or the profile name, loaded, and the profile checked against it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtuner.calibration.model_loading import load_model, read_shape
from kvtuner.pipeline.profile_lookup import profile_of
from kvtuner.pipeline.sources import model_source, searched_model
from kvtuner.runtime_loader.engine.local_engine import LocalEngine
from kvtuner.runtime_loader.engine.served_model import page_size_of
from kvtuner.runtime_loader.model_check import check_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtuner.pipeline.local.engine_flags import EngineFlags
    from kvtuner.pipeline.options import ModelOptions
    from kvtuner.runtime_loader.engine.generation import Delta, SamplingParameters


def open_engine(model: ModelOptions, flags: EngineFlags) -> LocalEngine:
    """Load a model and make an engine of it, by a profile if flags name one.

    The model is the profile's where none is named, as far as it can be found by that name.

    Raises:
        KVTunerError: The model or the profile cannot be had or served; the message says what would work.
    """
    profile = None
    if flags.profile is not None:
        profile = profile_of(flags.profile).profile
        model = searched_model(model, profile)
    shape = read_shape(model_source(model))
    if profile is not None:  # before weights are loaded
        check_model(profile, shape.config, context_length=shape.context_length)
        page_size_of(profile, flags.page_size)
    # An engine runs on one device.
    source = replace(model_source(model), device="cuda:0" if model.device == "auto" and _has_gpu() else model.device)
    loaded = load_model(source, shape)
    return LocalEngine(loaded.model, loaded.tokenizer, profile, **flags.settings(), context_length=shape.context_length)


def in_order(
    engine: LocalEngine, prompts: Sequence[Sequence[int]], sampling: SamplingParameters
) -> Iterator[tuple[int, Delta]]:
    """Answer prompts together; deltas come by prompt, those of the first that is not finished as they are made."""
    numbers = {engine.submit(tokens, sampling): number for number, tokens in enumerate(prompts)}
    waiting: list[list[Delta]] = [[] for _ in prompts]
    for number, deltas in enumerate(waiting):
        while True:
            yield from ((number, delta) for delta in deltas)
            if deltas and deltas[-1].finish_reason is not None:
                break
            deltas.clear()
            for delta in engine.step():
                waiting[numbers[delta.request_id]].append(delta)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
