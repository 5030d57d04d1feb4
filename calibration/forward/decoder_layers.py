"""The list of decoder layers in a model, found by its length. Knows nothing of what layers do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find_decoder_layers(model: PreTrainedModel, number: int) -> tuple[nn.Module, nn.ModuleList] | None:
    """The decoder and its list of so many layers: those of the outermost module that has one; None where none has."""
    for module in model.get_decoder().modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == number:
                return module, child
    return None
