"""The steps of transforms inside kernels, taken in the order that a transform names them.

They are those of `quant.STEPS`, rounding for rounding. A tile has channels last, padded to a power of two; padding
holds zeros, so that a step that mixes channels adds nothing to those beside them. Constants are [num_heads, head_dim].
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

KERNEL_STEPS: Final = ("centered", "balanced", "hadamard")
"""The steps that the three functions of this module take."""


@triton.constexpr_function
def mixes_channels(steps):
    """Return whether a step needs all channels of a head in a row, [tokens, channels]."""
    return "hadamard" in steps


def changes_queries(steps: tuple[str, ...]) -> bool:
    """Whether queries of stored space are others than those of model space."""
    return any(step != "centered" for step in steps)


@triton.jit
def apply_steps(x, head, channels, mask, mu_ptr, inverse_ptr, STEPS: tl.constexpr, DIM: tl.constexpr):
    """Take keys or values of a head to stored space, float32; `channels` and their `mask` can be broadcast to `x`."""
    y = x.to(tl.float32)  # the shape of x
    constants = tl.broadcast_to(head * DIM + channels, x.shape)  # the shape of x
    mask = tl.broadcast_to(mask, x.shape)  # the shape of x
    for index in tl.static_range(len(STEPS)):
        if STEPS[index] == "centered":
            y = y - tl.load(mu_ptr + constants, mask=mask, other=0.0)
        elif STEPS[index] == "balanced":
            y = y * tl.load(inverse_ptr + constants, mask=mask, other=0.0)
        elif STEPS[index] == "hadamard":
            y = _hadamard(tl.where(mask, y, 0.0), DIM)
    return y


@triton.jit
def invert_steps(y, head, channels, mask, mu_ptr, lam_ptr, STEPS: tl.constexpr, DIM: tl.constexpr):
    """Take stored keys or values, or sums of values, back to model space: [rows, channels] float32."""
    for index in tl.static_range(len(STEPS) - 1, -1, -1):
        if STEPS[index] == "centered":
            y = y + tl.load(mu_ptr + head * DIM + channels, mask=mask, other=0.0)[None, :]
        elif STEPS[index] == "balanced":
            y = y * tl.load(lam_ptr + head * DIM + channels, mask=mask, other=0.0)[None, :]
        elif STEPS[index] == "hadamard":
            y = _hadamard(y, DIM)
    return y


@triton.jit
def apply_steps_to_queries(q, kv_head, channels, mask, lam_ptr, STEPS: tl.constexpr, DIM: tl.constexpr):
    """Take queries [queries, channels] float32 of one KV head to the space of its stored keys."""
    for index in tl.static_range(len(STEPS)):
        if STEPS[index] == "balanced":
            q = q * tl.load(lam_ptr + kv_head * DIM + channels, mask=mask, other=0.0)[None, :]
        elif STEPS[index] == "hadamard":
            q = _hadamard(q, DIM)
    return q


@triton.constexpr_function
def _stages_of(head_dim):
    """Return the stages of a butterfly of `quant.hadamard_block` channels."""
    return (head_dim & -head_dim).bit_length() - 1


@triton.jit
def _hadamard(x, DIM: tl.constexpr):
    """Orthonormal Hadamard of [rows, channels] in blocks of DIM's, in the order of `quant.hadamard`."""
    STAGES: tl.constexpr = _stages_of(DIM)
    BLOCK: tl.constexpr = 1 << STAGES
    ROWS: tl.constexpr = x.shape[0]
    CHANNELS: tl.constexpr = x.shape[1]
    # A stage adds neighbours and moves their sums before their differences, so that the next one finds its pairs there.
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.reshape(x, (ROWS, CHANNELS // BLOCK, BLOCK // 2, 2)))  # [ROWS, blocks, BLOCK / 2]
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, CHANNELS))
    return x * (BLOCK**-0.5)
