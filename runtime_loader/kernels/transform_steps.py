"""The steps of transforms inside kernels, taken in the order that a transform names them.

They are those of `quant.STEPS`, rounding for rounding. A tile has channels last, padded to a power of two; padding
holds zeros, so that a step that mixes channels adds nothing to those beside them. Constants are [num_heads, head_dim].
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.unpack_codes import for_each, power_of_two

KERNEL_STEPS: Final = ("centered", "balanced", "hadamard")
"""The steps that the three functions of this module take."""
INNER: Final = tl.constexpr(4)
"""The channels side by side of a lane, where tokens are stored."""
LANES: Final = tl.constexpr(4)
"""The lanes that share a row there, and `WIDE_LANES` those of one whose channels would take all registers of four."""
WIDE_LANES: Final = tl.constexpr(16)
_WIDE: Final = 256


@triton.constexpr_function
def lanes_of(head_dim):
    """Return the lanes that share a row of channels that are a power of two."""
    return LANES.value if head_dim <= _WIDE else WIDE_LANES.value


@triton.constexpr_function
def mixes_channels(steps):
    """Return whether a step needs all channels of a head in a row, [tokens, channels]."""
    return "hadamard" in steps


def changes_queries(steps: tuple[str, ...]) -> bool:
    """Whether queries of stored space are others than those of model space."""
    return any(step != "centered" for step in steps)


@triton.jit
def apply_steps(x, head, channels, mask, mu_ptr, inverse_ptr, STEPS: tl.constexpr, DIM: tl.constexpr):
    """Take keys or values of a head to stored space, float32; `channels` and their `mask` can be broadcast to `x`.

    To mix channels, `x` is [OUTER, tokens, LANES, INNER]: channels in their order, but for tokens amid them.
    """
    y = x.to(tl.float32)  # the shape of x
    constants = tl.broadcast_to(head * DIM + channels, x.shape)  # the shape of x
    mask = tl.broadcast_to(mask, x.shape)  # the shape of x
    for index in tl.static_range(len(STEPS)):
        if STEPS[index] == "centered":
            y = y - tl.load(mu_ptr + constants, mask=mask, other=0.0)
        elif STEPS[index] == "balanced":
            y = y * tl.load(inverse_ptr + constants, mask=mask, other=0.0)
        elif STEPS[index] == "hadamard":
            y = _hadamard_of_lanes(tl.where(mask, y, 0.0), DIM)
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


@triton.constexpr_function
def _lanes_apart(stage, lanes):
    """Return how far the lanes lie whose numbers a stage adds, 0 where both are one lane's."""
    return 1 << (stage - 2) if 2 <= stage < 1 + lanes.bit_length() else 0


@triton.constexpr_function
def _parts_apart(stage, count, lanes):
    """Return how far the parts lie that a stage adds: the lower its channels' bit, the farther."""
    return count >> (stage + 1 if stage < 2 else stage + 2 - lanes.bit_length())


@triton.jit
def _split_bit(index, parts):
    """The numbers [ROWS, LANES, half] of a part whose place in it is even, or odd, as `index` is."""
    x = parts[index // 2]  # [ROWS, LANES, numbers]
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
    if index % 2 == 0:
        part = even
    else:
        part = odd
    return part


@triton.jit
def _join_bit(index, parts):
    """The part [ROWS, LANES, numbers] of two [ROWS, LANES, half] that `_split_bit` took apart."""
    even = parts[2 * index]  # [ROWS, LANES, half]
    return tl.reshape(tl.join(even, parts[2 * index + 1]), (even.shape[0], even.shape[1], 2 * even.shape[2]))


@triton.jit
def _sum_or_difference(index, parts, APART: tl.constexpr):
    """A number of a butterfly's stage: the sum or the difference of two parts that lie `APART`."""
    if (index // APART) % 2 == 0:
        result = parts[index] + parts[index + APART]
    else:
        result = parts[index - APART] - parts[index]
    return result


@triton.jit
def _across_lanes(index, parts, others, signs):
    """A number of a butterfly's stage that lanes share: the other lane's, plus or minus this one's."""
    x = parts[index]  # [ROWS, LANES, 1]
    # Exact but for the sum: a product with 1 or -1.
    return tl.fma(x, tl.broadcast_to(signs, x.shape), tl.gather(x, tl.broadcast_to(others, x.shape), 1))


@triton.jit
def _hadamard_of_lanes(x, DIM: tl.constexpr):
    """Orthonormal Hadamard as `_hadamard`, of channels [OUTER, ROWS, LANES, INNER], of which lanes share each row."""
    STAGES: tl.constexpr = _stages_of(DIM)
    OUTER: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1]
    SHARED_BY: tl.constexpr = x.shape[2]
    COUNT: tl.constexpr = OUTER * INNER
    BITS: tl.constexpr = _stages_of(COUNT)
    # Every number a tensor of its own, one register of a lane: no stage but those of lanes moves anything.
    parts = (tl.reshape(tl.permute(x, (1, 2, 0, 3)), (ROWS, SHARED_BY, COUNT)),)
    for bit in tl.static_range(BITS):
        parts = for_each(_split_bit, 2 << bit, (parts,))  # the place's lowest bit becomes the index's highest
    lane = tl.arange(0, SHARED_BY)[None, :, None]  # [1, lanes, 1]
    for stage in tl.static_range(STAGES):
        if _lanes_apart(stage, SHARED_BY):
            signs = tl.where((lane & _lanes_apart(stage, SHARED_BY)) == 0, 1.0, -1.0)  # [1, lanes, 1]
            parts = for_each(_across_lanes, COUNT, (parts, lane ^ _lanes_apart(stage, SHARED_BY), signs))
        else:
            parts = for_each(_sum_or_difference, COUNT, (parts, _parts_apart(stage, COUNT, SHARED_BY)))
    for bit in tl.static_range(BITS):
        parts = for_each(_join_bit, COUNT >> (1 + bit), (parts,))
    x = tl.permute(tl.reshape(parts[0], (ROWS, SHARED_BY, OUTER, INNER)), (2, 0, 1, 3))
    return x * ((1 << STAGES) ** -0.5)


@triton.constexpr_function
def spread_of(units):
    """Return the lanes that share a token's row of a head whose channels are no power of two: lane u % lanes has u."""
    return min(units & -units, LANES.value)


@triton.jit
def _part_of(index, x_ptrs, mask, APART: tl.constexpr):
    return tl.load(x_ptrs + index * APART, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _centered_part(index, parts, mu_ptrs, APART: tl.constexpr):
    return parts[index] - tl.load(mu_ptrs + index * APART)


@triton.jit
def _balanced_part(index, parts, inverse_ptrs, APART: tl.constexpr):
    return parts[index] * tl.load(inverse_ptrs + index * APART)


@triton.jit
def _scaled_part(index, parts, factor: tl.constexpr):
    return parts[index] * factor


@triton.constexpr_function
def _reversed(index, count):
    """Return an index below a power of two with its bits in reverse."""
    bits = count.bit_length() - 1
    return sum((index >> bit & 1) << (bits - 1 - bit) for bit in range(bits))


@triton.jit
def _padded_part(index, parts, PLACES: tl.constexpr, COUNT: tl.constexpr):
    """The part of a place, [ROWS, LANES, 1], in the order that joins undo; zeros behind the PLACES of each slot."""
    PADDED: tl.constexpr = power_of_two(PLACES)
    AT: tl.constexpr = _reversed(index, COUNT)
    if AT % PADDED < PLACES:
        part = parts[AT // PADDED * PLACES + AT % PADDED]
    else:
        part = tl.zeros_like(parts[0])
    return part[:, :, None]


@triton.jit
def load_spread(
    x_ptrs, mask, head, mu_ptr, inverse_ptr, STEPS: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    """Load rows of DIM channels, no power of two, and take them to stored space, [SLOTS * places, rows, lanes] float32.

    `x_ptrs` [rows, lanes] are those of the first channels. A lane has every `lanes`-th channel, so all codes of its
    units; the units of a slot are padded to a power of two of places by zeros, which are constants of the compiler.
    """
    SPREAD: tl.constexpr = x_ptrs.shape[1]
    COUNT: tl.constexpr = DIM // SPREAD
    PADDED: tl.constexpr = SLOTS * power_of_two(COUNT // SLOTS)
    STAGES: tl.constexpr = _stages_of(DIM)
    LANE_STAGES: tl.constexpr = _stages_of(SPREAD)
    lane = tl.arange(0, SPREAD)[None, :]  # [1, SPREAD]
    constants = head * DIM + lane  # [1, SPREAD]
    parts = for_each(_part_of, COUNT, (x_ptrs, mask, SPREAD))  # [rows, SPREAD] each, a number of each lane
    for index in tl.static_range(len(STEPS)):
        if STEPS[index] == "centered":
            parts = for_each(_centered_part, COUNT, (parts, mu_ptr + constants, SPREAD))
        elif STEPS[index] == "balanced":
            parts = for_each(_balanced_part, COUNT, (parts, inverse_ptr + constants, SPREAD))
        elif STEPS[index] == "hadamard":
            for stage in tl.static_range(STAGES):
                if stage < LANE_STAGES:
                    signs = tl.where((lane & (1 << stage)) == 0, 1.0, -1.0)  # [1, SPREAD]
                    parts = for_each(_across_lanes, COUNT, (parts, lane ^ (1 << stage), signs))
                else:
                    parts = for_each(_sum_or_difference, COUNT, (parts, 1 << (stage - LANE_STAGES)))
            parts = for_each(_scaled_part, COUNT, (parts, (1 << STAGES) ** -0.5))
    parts = for_each(_padded_part, PADDED, (parts, COUNT // SLOTS, PADDED))
    for bit in tl.static_range(_stages_of(PADDED)):
        parts = for_each(_join_bit, PADDED >> (1 + bit), (parts,))
    return tl.permute(parts[0], (2, 0, 1))
