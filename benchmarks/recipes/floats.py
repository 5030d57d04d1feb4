"""SGLang's caches in small floating-point numbers: fp8 (e4m3, scale 1) and NVFP4 (sgl-project/sglang#21601).

NVFP4 stores e2m1 codes, an e4m3 scale for 16 channels, and one scale of a layer's keys and of its values, which takes
the largest magnitude of a calibration to the largest number of both formats together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvtuner.quant import FP8_E4M3_MAX, quantize_fp8

from .recipe import Recipe, StoredSide
from .turboquant import nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .moments import LayerMoments

SOURCE: Final = "SGLang 0.5.23, --kv-cache-dtype fp8_e4m3"
NVFP4_SOURCE: Final = "sgl-project/sglang#21601"
BLOCK: Final = 16
E2M1_MAX: Final = 6.0
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, E2M1_MAX)


@dataclass(frozen=True, slots=True)
class Fp8:
    """SGLang's fp8 cache."""

    def read_back(self, x: Tensor) -> Tensor:
        """See `Quantizer`."""
        return quantize_fp8(x)

    def bits(self, head_dim: int) -> float:
        """See `Quantizer`."""
        return 8.0


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """SGLang's NVFP4 cache; `largest` is the largest magnitude that calibration saw."""

    largest: float

    def read_back(self, x: Tensor) -> Tensor:
        """See `Quantizer`."""
        unit = self.largest / (E2M1_MAX * FP8_E4M3_MAX)
        blocks = x.to(torch.float32).unflatten(-1, (-1, BLOCK))
        scale = quantize_fp8(blocks.abs().amax(-1, keepdim=True) / E2M1_MAX / unit) * unit
        step = torch.where(scale == 0, torch.ones_like(scale), scale)
        codes = nearest((blocks / step).abs(), torch.tensor(E2M1)) * blocks.sign()
        read: Tensor = codes * scale
        return read.flatten(-2)

    def bits(self, head_dim: int) -> float:
        """See `Quantizer`."""
        return 4 + 8 / BLOCK


def fp8(num_layers: int) -> Recipe:
    """SGLang's fp8 cache."""
    side = StoredSide(Fp8())
    return Recipe("SGLang fp8", "SGLang", SOURCE, ((side, side),) * num_layers)


def nvfp4(moments: Sequence[LayerMoments]) -> Recipe:
    """SGLang's NVFP4 cache."""
    layers = [(StoredSide(Nvfp4(layer.k_max)), StoredSide(Nvfp4(layer.v_max))) for layer in moments]
    return Recipe("SGLang NVFP4", "SGLang", NVFP4_SOURCE, layers)
