"""The list of decoder layers in a model, found by its length, how their streams of hidden states become one, its head.

Knows nothing of what layers do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find_decoder_layers(model: PreTrainedModel, number: int) -> tuple[nn.Module, nn.ModuleList] | None:
    """The decoder and its list of so many layers: those of the outermost module that has one; None where none has."""
    for module in model.get_decoder().modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == number:
                return module, child
    return None


def output_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """What makes logits of final hidden states, in the model or the language model in it; None where nothing does."""
    for module in (model, getattr(model, "language_model", None)):
        find = getattr(module, "get_output_embeddings", None)
        head: nn.Module | None = None if find is None else find()
        if head is not None:
            return head
    return None


def merged_streams(decoder: nn.Module, hidden: Tensor) -> Tensor:
    """The one hidden state [batch, tokens, hidden_size] that a decoder makes of its last layer's output.

    It is the output itself, but with AltUp (Gemma 3n), whose layers have several streams, [streams, batch, tokens,
    hidden_size]: each is projected to the magnitude of the first, and they are averaged.
    """
    projections = getattr(decoder, "altup_unembed_projections", None)
    if projections is None:
        return hidden
    first, *others = hidden
    magnitude = first.square().mean(dim=-1, keepdim=True) ** 0.5
    streams = [first]
    for projection, stream in zip(projections, others, strict=True):
        projected = projection(stream)
        own = projected.square().mean(dim=-1, keepdim=True).clamp_min(1e-5).sqrt()
        streams.append(projected * magnitude / own)
    return torch.stack(streams).mean(dim=0)
