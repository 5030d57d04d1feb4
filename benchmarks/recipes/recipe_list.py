"""All recipes with the settings that their authors publish. Knows nothing of measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .floats import fp8, nvfp4
from .kivi import kivi
from .kvarn import kvarn
from .oscar import oscar
from .rotated import quarot, saw_int4
from .turboquant import turboquant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .moments import LayerMoments
    from .recipe import Recipe


def all_recipes(moments: Sequence[LayerMoments]) -> list[Recipe]:
    """Every recipe for a model of which these are the layers."""
    layers = len(moments)
    return [
        kivi(2, layers),
        kivi(4, layers),
        quarot(2, layers),
        oscar(moments, window=False),
        oscar(moments, window=True),
        turboquant(3, layers),
        turboquant(4, layers),
        turboquant(3, layers, with_signs=True),
        turboquant(4, layers, with_signs=True),
        kvarn(layers),
        kvarn(layers, sinks=0),
        saw_int4(layers),
        nvfp4(moments),
        fp8(layers),
    ]
