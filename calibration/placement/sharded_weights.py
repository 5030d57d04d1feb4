"""Weights that lie in parts on several ranks, and what needs more than a module's own forward to use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable


def is_sharded(model: nn.Module) -> bool:
    """Whether a model's weights lie on several ranks, which then all have to run the same layers in the same order."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """A weight with the parts of all ranks, each of which calls this; one that lies here is given back as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def bytes_here(weights: Iterable[Tensor]) -> int:
    """The bytes that weights take on this rank."""
    storages = (_part_here(weight).untyped_storage() for weight in weights)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def release_other_parts(model: nn.Module) -> None:
    """Give parts that are views of whole weights memory of their own, so that the rest is freed."""
    copies: dict[nn.Parameter, nn.Parameter] = {}  # by the weight, which several modules may share
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            part = _part_here(weight)
            if not isinstance(weight, DTensor) or part.untyped_storage().nbytes() <= part.nbytes:
                continue
            if weight not in copies:
                copy = DTensor.from_local(
                    part.clone(),
                    weight.device_mesh,
                    weight.placements,
                    run_check=False,
                    shape=weight.shape,
                    stride=weight.stride(),
                )
                copies[weight] = nn.Parameter(copy, requires_grad=False)
            module.register_parameter(name, copies[weight])


def _part_here(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def logits_of_tokens(head: nn.Linear, final: Tensor, tokens: Tensor) -> Tensor:
    """Logits of some tokens, float32 [rows, len(tokens)], of final hidden states [rows, hidden_size].

    Of a head in parts each rank computes those of its own tokens.
    """
    weight, bias = head.weight, head.bias
    if not isinstance(weight, DTensor):
        chosen = None if bias is None else bias[tokens]
        return nn.functional.linear(final, weight.index_select(0, tokens), chosen).to(torch.float32)
    rows = weight.to_local()
    own = tokens - weight.device_mesh.get_local_rank() * len(rows)
    is_here = (own >= 0) & (own < len(rows))
    own = own[is_here]
    own_bias = None if bias is None else _part_here(bias)[own]
    logits = torch.zeros((*final.shape[:-1], len(tokens)), dtype=torch.float32, device=rows.device)
    logits[..., is_here] = nn.functional.linear(final, rows[own], own_bias).to(torch.float32)
    dist.all_reduce(logits, group=weight.device_mesh.get_group())
    return logits
