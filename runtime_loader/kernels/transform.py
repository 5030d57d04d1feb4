"""The Hadamard transform inside kernels, in the order of `quant.hadamard`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hadamard(x, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr):
    """Orthonormal Hadamard of [TOKENS, CHANNELS] in blocks of 2 ** STAGES, in the order of `quant.hadamard`."""
    BLOCK: tl.constexpr = 1 << STAGES
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.reshape(x, (TOKENS, CHANNELS // BLOCK, BLOCK // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (TOKENS, CHANNELS))
    return x * (BLOCK**-0.5)
