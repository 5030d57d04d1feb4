"""What an engine needs of a loaded model: its context, its device, the sizes of its pool and its ends."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

from kvtuner.errors import RequestError, ServingError, UnsupportedModelError
from kvtuner.exported_configs.identity.model_identity import max_positions
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import NO_WINDOW
from kvtuner.runtime_loader.engine.engine_options import DEFAULT_PAGE_SIZE
from kvtuner.runtime_loader.engine.paged_pool import PoolShape
from kvtuner.runtime_loader.model_check import check_served_model
from kvtuner.runtime_loader.row_format import LayerFormat, RowFormat, rank_formats
from kvtuner.supported_models import refuse_other_caches

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import PreTrainedModel

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.runtime_loader.engine.engine_options import EngineOptions


def context_length_of(model: PreTrainedModel, options: EngineOptions) -> int:
    """The tokens that a request may have, by options or by the model's positions.

    Raises:
        ServingError: The model has fewer positions, or does not say.
    """
    longest = max_positions(model.config)
    asked = options.context_length
    if asked is None and longest is None:
        raise ServingError("the model does not say its context; give context_length")
    if asked is not None and longest is not None and asked > longest:
        raise ServingError(f"a context of {asked} tokens is longer than the model's {longest} positions")
    return asked or longest or 0


def pool_shape_of(
    model: PreTrainedModel, profile: Profile | None, context_length: int, options: EngineOptions
) -> PoolShape:
    """The sizes of the pool of a model, by a profile that is checked, or of rows of 16 bits without one.

    Raises:
        UnsupportedModelError: A layer's cache is not one key and value per token and head.
        ProfileError: The profile belongs to another model.
        ServingError: Pages would cut groups of keys per channel.
    """
    formats = _formats_of(model, profile, context_length, options)
    return PoolShape(
        formats,
        model.dtype,
        page_size_of(profile, options.page_size),
        options.max_requests,
        context_length,
        NO_WINDOW if profile is None else profile.window,
    )


def _formats_of(
    model: PreTrainedModel, profile: Profile | None, context_length: int, options: EngineOptions
) -> tuple[LayerFormat, ...]:
    """The formats of all layers' rows."""
    refuse_other_caches(model.config, context_length=context_length)
    if profile is None:
        geometry = ModelGeometry.from_config(model.config)
        k, v = (RowFormat(geometry.num_kv_heads, dim, None) for dim in (geometry.head_dim, geometry.v_head_dim))
        return (LayerFormat(k, v),) * geometry.num_layers
    for warning in check_served_model(
        profile, model.config, context_length=context_length, allow_derived=options.allow_derived
    ):
        warnings.warn(warning, stacklevel=4)
    return rank_formats(profile, range(len(profile.pairs)))


def page_size_of(profile: Profile | None, asked: int | None) -> int:
    """The tokens of a page, as asked for or by default: whole groups of the tokens that share a scale of keys.

    Raises:
        ServingError: The pages that are asked for would cut groups of keys per channel.
    """
    group = profile.defaults.k.group_size if profile is not None and profile.has_per_channel_keys else None
    if asked is None:
        return max(DEFAULT_PAGE_SIZE, group or 1)
    if group is not None and asked % group:
        raise ServingError(
            f"pages of {asked} tokens do not work with keys per channel of {group} tokens per scale; ask for {group},"
            " or a multiple of it"
        )
    return asked


def device_of(model: PreTrainedModel) -> torch.device:
    """The one device of a model; an `UnsupportedModelError` where it lies on several."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise UnsupportedModelError(
            f"the model lies on {len(devices)} devices; an engine runs on one, so load it to one"
        )
    return devices.pop()


def ends_of(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer by the model's own configuration, or by its tokenizer."""
    own = getattr(model.generation_config, "eos_token_id", None)
    if own is None:
        own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(() if own is None else own if isinstance(own, list) else [own])


def tokens_of(prompt: str | Sequence[int], model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """The tokens of a prompt.

    Raises:
        RequestError: There are none, one is outside of the vocabulary, or there is no tokenizer for text.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("a prompt of text needs a tokenizer; give tokens")
        prompt = cast("list[int]", tokenizer(prompt)["input_ids"])
    tokens, vocab_size = list(prompt), cast("torch.nn.Embedding", model.get_input_embeddings()).num_embeddings
    if not tokens:
        raise RequestError("a prompt needs at least one token; this one is empty")
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise RequestError(f"token {wrong[0]} is outside of the vocabulary of {vocab_size}")
    return tokens
