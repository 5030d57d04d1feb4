"""Refuses activations that hold NaN or infinity, by the layer that made them. Knows nothing of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtuner.errors import NonFiniteActivationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def check_finite(layer_id: int, **tensors: Tensor) -> None:
    """Check a layer's activations, named in the plural.

    Raises:
        NonFiniteActivationError: NaN or infinity.
    """
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteActivationError(
                f"layer {layer_id}: its {name} hold NaN or infinity;"
                " try --dtype float32 or bfloat16, or check the checkpoint"
            )


def check_residual(residual: Sequence[Tensor]) -> None:
    """Check the inputs of the layers that ran, each as the outputs of the layer before it.

    Raises:
        NonFiniteActivationError: NaN or infinity; names the first layer that gave any, or layer 0 if its input has.
    """
    check_finite(0, inputs=residual[0])
    for layer_id, outputs in enumerate(residual[1:]):
        check_finite(layer_id, outputs=outputs)
