"""Queries of the attention kernels: which of them a program has, their transform, and the cap of their scores."""

from __future__ import annotations

import triton
import triton.language as tl

from kvtuner.runtime_loader.kernels.transform_steps import apply_steps_to_queries
from kvtuner.runtime_loader.kernels.unpack_codes import (
    factor_of,
    fp16_saturated,
    offset_step,
    power_of_two,
    row_offsets,
)


@triton.jit
def wait_for_kernel_before(DEPENDENT: tl.constexpr):
    """Wait, in a launch that began early, for the kernel in front of it, and let the one behind it begin."""
    # First of all, since nothing says which argument that kernel writes; programs that wait take room of no other.
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _first_tile(request, q_indptr_ptr, GQA: tl.constexpr, TILE: tl.constexpr):
    """The first tile of a request."""
    # From its first query alone: at most one tile of each request stays empty.
    return (tl.load(q_indptr_ptr + request) * GQA // TILE).to(tl.int32) + request


@triton.jit
def queries_of(
    q_indptr_ptr, num_requests, HEADS: tl.constexpr, JOINED: tl.constexpr, GQA: tl.constexpr, TILE: tl.constexpr,
    EXTEND: tl.constexpr,
):  # fmt: skip
    """Return a program's request, KV head, queries and heads [TILE], the mask of these, and whether any is real.

    Of JOINED KV heads the first is returned; each has its part of the tile, and one query.
    """
    # The first axis of the grid is KV heads, and tiles of each; where requests have one query, the third is requests.
    # Heads of a query lie side by side, so that a tile is full where many queries share a KV head.
    tiles = tl.num_programs(0) // (HEADS // JOINED)
    kv_head = tl.program_id(0) // tiles * JOINED
    tile = tl.program_id(0) % tiles
    if EXTEND:
        # The last request whose tiles begin no later than this one, by bisection: the lengths are on the device alone.
        low = 0
        high = num_requests
        while low < high:
            middle = (low + high + 1) // 2
            later = _first_tile(middle, q_indptr_ptr, GQA, TILE) > tile
            low = tl.where(later, low, middle)
            high = tl.where(later, middle - 1, high)
        any_pair = low < num_requests
        request = tl.minimum(low, num_requests - 1).to(tl.int64)
        tile -= _first_tile(request.to(tl.int32), q_indptr_ptr, GQA, TILE)
        first = tl.load(q_indptr_ptr + request).to(tl.int64)
        num_queries = (tl.load(q_indptr_ptr + request + 1) - first).to(tl.int32)
        pairs = tile * TILE + tl.arange(0, TILE)  # [TILE]
        queries = first + pairs // GQA  # [TILE]
        any_pair = any_pair & (tile * TILE < num_queries * GQA)
    else:
        request = tl.program_id(2).to(tl.int64)
        num_queries = 1
        pairs = tile * TILE + tl.arange(0, TILE)  # [TILE]
        queries = request + tl.zeros([TILE], tl.int64)  # [TILE]
        any_pair = tile * TILE < GQA
    heads = kv_head * GQA + pairs % GQA  # [TILE]
    mask_pairs = pairs < num_queries * GQA  # [TILE]
    if JOINED > 1:
        in_head = pairs % (TILE // JOINED)  # [TILE]
        heads = (kv_head + pairs // (TILE // JOINED)) * GQA + in_head % GQA  # [TILE]
        mask_pairs = in_head < GQA
    return request, kv_head, queries, heads, mask_pairs, any_pair


@triton.jit
def tokens_of_split(length, num_splits, MIN_SPLIT: tl.constexpr, TOKENS: tl.constexpr):
    """Return the tokens of a request's splits: whole blocks, and at least MIN_SPLIT; later splits may be empty."""
    return tl.cdiv(tl.cdiv(tl.maximum(length, MIN_SPLIT * num_splits), num_splits), TOKENS) * TOKENS


@triton.jit
def split_of(indptr_ptr, request, split, num_splits, MIN_SPLIT: tl.constexpr, TOKENS: tl.constexpr):
    """Return the start of a request's slots, and the first and last of its tokens that a split reads."""
    begin = tl.load(indptr_ptr + request).to(tl.int64)
    length = (tl.load(indptr_ptr + request + 1) - begin).to(tl.int32)
    per_split = tokens_of_split(length, num_splits, MIN_SPLIT, TOKENS)
    first = split * per_split
    return begin, first, tl.minimum(first + per_split, length)


@triton.jit
def slots_of_block(slots_ptr, tokens, last, ASM: tl.constexpr):
    """The slots of a block of tokens, [TOKENS]; past the end that of the last token, so that every row read is one."""
    # Clamped places need no mask, nor do rows and words at these slots. Offsets of 32 bits without a sign, and the
    # lower half of a slot, save most of what an address takes.
    SIZE: tl.constexpr = slots_ptr.dtype.element_ty.primitive_bitwidth // 8  # bytes of a slot
    if ASM:
        places = tl.minimum(tokens, last - 1).to(tl.uint32)  # [TOKENS]
        offsets = tl.reshape(row_offsets(places[:, None], SIZE, [places.shape[0], 1], ASM), places.shape)  # [TOKENS]
    else:
        offsets = tl.minimum(SIZE * tokens, SIZE * (last - 1)).to(tl.uint32).to(tl.int64)  # [TOKENS]
    bytes_ptr = slots_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + offsets  # [TOKENS]
    # As another type first: what is carried over as it was loaded, Triton loads a block earlier, and the registers that
    # hold it all the while are missing elsewhere.
    return tl.load(bytes_ptr.to(tl.pointer_type(tl.float32), bitcast=True)).to(tl.uint32, bitcast=True)


@triton.jit
def positions_of_queries(queries, request, q_indptr_ptr, indptr_ptr, EXTEND: tl.constexpr):
    """Return the tokens of a request in rows, and the positions of its queries [TILE]; each alone is the last row's."""
    length = (tl.load(indptr_ptr + request + 1) - tl.load(indptr_ptr + request)).to(tl.int32)
    if EXTEND:
        positions = length + (queries - tl.load(q_indptr_ptr + request)).to(tl.int32)  # [TILE]
    else:
        positions = length - 1 + (queries * 0).to(tl.int32)  # [TILE]
    return length, positions


@triton.jit
def is_in_window(query_positions, positions, RESIDUAL: tl.constexpr, SINKS: tl.constexpr):
    """Whether queries have tokens in their exact window; the positions of both are broadcast to a tile."""
    return (positions > query_positions - RESIDUAL) | (positions < SINKS)


@triton.jit
def have_copies(tokens, first_query, positions_ptr, row, RESIDUAL: tl.constexpr, SINKS: tl.constexpr):
    """Whether tokens [TOKENS] that a query from `first_query` on may read exactly have copies in a slot's places."""
    asked = (tokens > first_query - RESIDUAL) | (tokens < SINKS)  # [TOKENS]
    places = tl.where(tokens < SINKS, tokens, SINKS + tokens % max(RESIDUAL, 1))  # [TOKENS]
    return asked & (tl.load(positions_ptr + row + places, mask=asked, other=-1) == tokens)


@triton.jit
def sliced_query(slot, q_base, mask, BITS: tl.constexpr, WIDE: tl.constexpr):
    """Queries [K_UNITS, TILE] at the channels of a slot, divided by the factor of its codes."""
    q = tl.load(q_base + slot * WIDE, mask=mask, other=0.0)  # [K_UNITS, TILE]
    if BITS != 16:
        # Here, once, where it costs nothing in the loop.
        q = fp16_saturated(q.to(tl.float32) * (1 / factor_of(slot, BITS)))
    return q


@triton.jit
def query_sum(group, q, scale, TILE: tl.constexpr, BITS: tl.constexpr, IN_GROUP: tl.constexpr, WORD: tl.constexpr):
    """The sum of queries over the channels of a group, times what multiplies every offset, [TILE]."""
    q_sum = tl.zeros([TILE], tl.float32)  # [TILE]
    if BITS != 16:
        for slot in tl.static_range(IN_GROUP):
            # Summed after the rounding, so that the minimum is weighted by the queries that the codes meet.
            part = q[group * IN_GROUP + slot]  # [K_UNITS, TILE]
            if part.shape[0] == 16:
                # By a product with ones: queries of two products Triton lays out as these take them before the loop,
                # those of one in every block, where 16 units go from lane to lane (more come from shared memory).
                part_sum = tl.max(tl.dot(tl.full([16, 16], 1.0, part.dtype), part), 0)  # [TILE]
            else:
                part_sum = tl.sum(part.to(tl.float32), 0)  # [TILE]
            q_sum += part_sum * factor_of(group * IN_GROUP + slot, BITS)
    # Products with zero points are multiplied by the score's scale later on, together with those of codes.
    return q_sum * (offset_step(BITS, WORD) if WORD == 16 else scale)


@triton.jit
def softcap(x, cap):
    """Cap * tanh(x / cap) of scores in units of log2."""
    # By exp2 of what is never positive, so that it cannot overflow.
    y = tl.exp2(-2.0 * tl.abs(x) / cap * 1.4426950408889634)  # the shape of x
    z = cap * (1.0 - y) / (1.0 + y)  # the shape of x
    return tl.where(x < 0, -z, z)


@triton.constexpr_function
def prepared_heads(gqa, padded):
    """Return how many query heads of a KV head a program of `prepare_queries` has: its tile fits in registers."""
    return min(power_of_two(gqa), max(1, 8192 // padded))


@triton.jit
def prepare_queries(
    q_ptr, q_stride_t, q_stride_h, lam_ptr, mu_ptr, out_ptr, bias_ptr,
    HEADS: tl.constexpr, GQA: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr,
    BIASED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write queries of one KV head in the space of its keys, [queries, num_heads, DIM]; with BIASED also q . mu."""
    wait_for_kernel_before(DEPENDENT)
    TILE: tl.constexpr = prepared_heads(GQA, PADDED)
    TILES: tl.constexpr = (GQA + TILE - 1) // TILE  # of a KV head
    query = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // TILES
    in_group = tl.program_id(1) % TILES * TILE + tl.arange(0, TILE)  # [TILE]
    channels = tl.arange(0, PADDED)  # [PADDED]
    mask_heads = in_group < GQA  # [TILE]
    mask_channels = channels < DIM  # [PADDED]
    mask = mask_heads[:, None] & mask_channels[None, :]  # [TILE, PADDED]
    heads = kv_head * GQA + in_group  # [TILE]
    q_ptrs = q_ptr + query * q_stride_t + heads[:, None] * q_stride_h + channels[None, :]  # [TILE, PADDED]
    q = tl.load(q_ptrs, mask=mask, other=0.0).to(tl.float32)  # [TILE, PADDED]
    places = query * (HEADS * GQA) + heads  # [TILE]
    if BIASED:
        mu = tl.load(mu_ptr + kv_head * DIM + channels, mask=mask_channels, other=0.0)  # [PADDED]
        tl.store(bias_ptr + places, tl.sum(q * mu[None, :], 1), mask=mask_heads)
    q = apply_steps_to_queries(q, kv_head, channels, mask_channels, lam_ptr, STEPS, DIM)
    if out_ptr.dtype.element_ty == tl.float16:
        q = fp16_saturated(q)
    tl.store(out_ptr + places[:, None] * DIM + channels[None, :], q.to(out_ptr.dtype.element_ty), mask=mask)
