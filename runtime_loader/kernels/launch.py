"""Launches of the kernels on two sides of a layer and a batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
import triton

from kvtuner.precision import num_slots
from kvtuner.runtime_loader.kernels.decode import decode_split
from kvtuner.runtime_loader.kernels.extend_and_merge import attend_fresh, merge_splits
from kvtuner.runtime_loader.kernels.keys.store_groups import store_groups
from kvtuner.runtime_loader.kernels.launch_settings import MOST_SPLITS, WIDE
from kvtuner.runtime_loader.kernels.queries import prepare_queries, prepared_heads
from kvtuner.runtime_loader.kernels.read_rows import read_joined, read_side
from kvtuner.runtime_loader.kernels.store_rows import store_rows
from kvtuner.runtime_loader.kernels.transform_steps import LANES, changes_queries
from kvtuner.runtime_loader.kernels.window import attend_copies, store_copies

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.exact_ring import ExactRing, NewTokens, WindowReads
    from kvtuner.runtime_loader.kernels.kernel_side import Facts, KernelSide
    from kvtuner.runtime_loader.kernels.launch_settings import DecodeLaunch
    from kvtuner.runtime_loader.kernels.scratch import Scratch
    from kvtuner.runtime_loader.packed_attention import ExtendBounds, NewKeys, ScoreScaling

STORED_TOKENS: Final = 8
"""The tokens that a program stores, at the least."""
READ_TOKENS: Final = 16
PACKED_UNITS: Final = 16
"""The units of a program that packs keys per channel."""
MERGED_SPLITS: Final = 16
FRESH: Final = {"TILE": 64, "TOKENS": 32}
COPIED_TOKENS: Final = 32
"""The places of a block, of those who copy tokens and of those who attend to copies."""
EXACT: Final[dict[str, Any]] = {"enable_fp_fusion": False, "num_warps": 1}
"""Compiler options of kernels that round as `quant.py` does: a product and a sum stay two roundings.

With one warp a group's minimum and maximum stay inside it: a quarter of the instructions of four (docs/kernels.md).
"""
LOG2_E: Final = math.log2(math.e)


def store(
    keys: KernelSide, values: KernelSide, slots: Tensor, k: Tensor, v: Tensor, *, only_keys: bool = False
) -> None:  # fmt: skip
    """Write keys and values [tokens, num_heads, head_dim], channels contiguous, to token slots [tokens]."""
    if not len(k):
        return
    facts = store_facts(keys, values)
    store_rows[(triton.cdiv(len(k), facts["TOKENS"]), keys.num_heads, 1 if only_keys else 2)](
        k, k.stride(0), k.stride(1), keys.rows, keys.mu, keys.inverse,
        v, v.stride(0), v.stride(1), values.rows, slots, len(k), **facts, **EXACT,
    )  # fmt: skip


def store_one(side: KernelSide, slots: Tensor, states: Tensor) -> None:
    """Write the keys or the values alone as `store` does, each token by itself."""
    store(side, side, slots, states, states, only_keys=True)


def store_groups_of(keys: KernelSide, ring: ExactRing, new: NewTokens, slots: Tensor, chunk: NewKeys | None) -> None:
    """Pack the groups of keys per channel that new tokens fill, as `PackedAttention.store_groups`."""
    if not len(new.requests):
        return
    states, new_slots, most = (ring.keys, slots, 1)
    if chunk is not None:
        states, new_slots, most = chunk.states, chunk.slots, triton.cdiv(chunk.longest, keys.token_group) + 1
    blocks = triton.cdiv(keys.head_dim // num_slots(keys.bits), PACKED_UNITS)
    store_groups[(len(new.requests), most, keys.num_heads * blocks)](
        states, states.stride(0), states.stride(1), new_slots, new.rows if new.tokens is None else new.tokens,
        ring.keys, ring.positions, new.requests, new.rows, slots, keys.rows, HEADS=keys.num_heads, DIM=keys.head_dim,
        BITS=keys.bits, ROW=keys.row, GROUP=keys.token_group, SYMMETRIC=keys.symmetric,
        RESIDUAL=ring.window.residual_length, SINKS=ring.window.sinks, UNITS=PACKED_UNITS, EXTEND=chunk is not None,
        **{**EXACT, "num_warps": max(1, num_slots(keys.bits) * keys.token_group * PACKED_UNITS // 2048)},
    )  # fmt: skip


def store_facts(keys: KernelSide, values: KernelSide) -> Facts:
    """The kernel's constants; a warp has more tokens where fewer lanes share one."""
    lanes = min(keys.stored_lanes, values.stored_lanes)
    facts: Facts = {"HEADS": keys.num_heads, "TOKENS": STORED_TOKENS * LANES.value // lanes}
    for name, side in (("K", keys), ("V", values)):
        own = {
            "ROW": side.row, "DIM": side.head_dim, "BITS": side.bits, "GROUPS": side.groups, "STEPS": side.steps,
            "SYMMETRIC": side.symmetric, "FITTED": side.fitted, "PADDED": side.padded,
            "WORD": side.word_bits,
        }  # fmt: skip
        facts |= {f"{name}_{key}": value for key, value in own.items()}
    return facts


def decode_facts(keys: KernelSide, values: KernelSide, gqa: int, launch: DecodeLaunch) -> Facts:
    """The decode kernel's constants, but for what a call changes: EXTEND, CAPPED, BIASED and a window's."""
    facts: Facts = {
        "HEADS": keys.num_heads, "JOINED": launch.heads, "GQA": gqa, "TILE": launch.tile, "TOKENS": launch.tokens,
        "MIN_SPLIT": launch.min_split, "ASM": launch.asm, "DEPENDENT": launch.dependent,
    }  # fmt: skip
    for name, side in (("K", keys), ("V", values)):
        own = {
            "ROW": side.row, "DIM": side.head_dim, "BITS": side.bits, "GROUPS": side.groups,
            "UNITS": side.units(launch.heads if name == "K" else 1), "WORD": side.word_bits,
        }  # fmt: skip
        facts |= {f"{name}_{key}": value for key, value in own.items()}
    return {**facts, "K_TOKEN_GROUP": keys.token_group}


def decode(
    q: Tensor, keys: KernelSide, values: KernelSide, indptr: Tensor, slots: Tensor, scores: ScoreScaling,
    launch: DecodeLaunch, num_splits: int, scratch: Scratch, out: Tensor, window: WindowReads | None = None,
) -> None:  # fmt: skip
    """Attention of one query per request over packed rows, in at most `num_splits` parts of a request.

    As `PackedAttention.decode`; `indptr` may be longer than [requests + 1]; channels of `q` and `out` are contiguous.
    """
    # Softmax cancels it where all keys are rows.
    biased = keys.centered and (scores.logit_cap > 0 or window is not None or scores.sink_scores is not None)
    queries, bias = prepare(q, keys, launch, scratch, biased=biased)
    partial, lse = _attend_rows(
        q, queries, bias, keys, values, indptr, slots, scores, launch, num_splits, scratch,
        num_requests=len(q), biased=biased, window=window, exact_parts=int(window is not None),
    )  # fmt: skip
    if window is not None:
        grid = (keys.num_heads * triton.cdiv(q.shape[1] // keys.num_heads, WIDE), 1, len(q))
        _attend_copies(
            grid, q, keys, values, indptr, indptr, partial, lse, scores, num_splits, len(q), window, TILE=WIDE,
            EXTEND=False, EXACT_PARTS=1, PART=0, num_warps=4,
        )  # fmt: skip
    merge(
        partial, lse, indptr, values, launch, num_splits, len(q), out, scores, extend=False,
        exact_parts=int(window is not None),
    )  # fmt: skip


def extend(
    q: Tensor, k: Tensor, v: Tensor, keys: KernelSide, values: KernelSide, bounds: ExtendBounds, scores: ScoreScaling,
    launch: DecodeLaunch, num_splits: int, scratch: Scratch, out: Tensor, window: WindowReads | None = None,
) -> None:  # fmt: skip
    """Attention of new tokens over their request's packed rows and over one another, causally or by a mask.

    As `PackedAttention.extend`; channels of all tensors are contiguous, `k` and `v` have the dtype of `q`, and `out`
    gets zeros for tokens of no request.
    """
    # The two are merged by the sums of their exponents, so that q . mu, which cached keys alone have lost, is added to
    # what rows say; the values' transform is undone on their part alone.
    queries, bias = prepare(q, keys, launch, scratch, biased=keys.centered)
    num_requests = len(bounds.tokens) - 1
    # What new tokens read of one another: all of it, or what is inside of their windows exactly and the rest as stored.
    mask, starts, fresh = bounds.tokens, bounds.tokens, [("all", k, v)]
    if bounds.mask is not None:
        assert window is None
        mask, starts, fresh = bounds.mask.mask.view(torch.uint8), bounds.mask.starts, [("masked", k, v)]
    if window is not None and window.stored is not None:
        k_stored, v_stored = (states.to(q.dtype).contiguous() for states in window.stored)
        fresh = [("inside", k, v), ("outside", k_stored, v_stored)]
    parts = len(fresh) + (window is not None)
    partial, lse = _attend_rows(
        q, queries, bias, keys, values, bounds.prefix, bounds.slots, scores, launch, num_splits, scratch,
        num_requests=num_requests, biased=keys.centered, bounds=bounds, window=window, exact_parts=parts,
    )  # fmt: skip
    gqa = q.shape[1] // keys.num_heads
    grid = (keys.num_heads * tiles_of(len(q), num_requests, gqa, FRESH["TILE"]),)
    for part, (reads, new_k, new_v) in enumerate(fresh):
        attend_fresh[grid](
            q, q.stride(0), q.stride(1), new_k, new_k.stride(0), new_k.stride(1), new_v, new_v.stride(0),
            new_v.stride(1), bounds.tokens, bounds.prefix, mask, starts, partial, lse, scores.scale * LOG2_E,
            scores.logit_cap * LOG2_E, num_splits, num_requests, HEADS=keys.num_heads, GQA=gqa, K_DIM=keys.head_dim,
            K_PADDED=keys.padded, V_DIM=values.head_dim, V_PADDED=values.padded, CAPPED=scores.logit_cap > 0,
            READS=reads, PART=part, EXACT_PARTS=parts, **window_constants(window), **FRESH,
            **fresh_options(keys, values),
        )  # fmt: skip
    if window is not None:
        _attend_copies(
            grid, q, keys, values, bounds.tokens, bounds.prefix, partial, lse, scores, num_splits, num_requests,
            window, TILE=FRESH["TILE"], EXTEND=True, EXACT_PARTS=parts, PART=parts - 1,
            **fresh_options(keys, values),
        )  # fmt: skip
    merge(
        partial, lse, bounds.tokens, values, launch, num_splits, num_requests, out, scores, extend=True,
        exact_parts=parts,
    )  # fmt: skip


def copy_tokens(ring: ExactRing, new: NewTokens, k: Tensor, v: Tensor) -> None:
    """Copy new tokens to their places, as `PackedAttention.store_copies`; channels of all tensors are contiguous."""
    extending, places = new.tokens is not None, ring.window.num_tokens
    heads, k_dim, v_dim = ring.keys.shape[2], ring.keys.shape[3], ring.values.shape[3]
    block = min(COPIED_TOKENS, triton.next_power_of_2(places)) if extending else 1
    store_copies[(len(new.requests), triton.cdiv(places, block) if extending else 1, heads)](
        k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1), ring.keys, ring.values, ring.positions,
        new.requests, new.rows if new.tokens is None else new.tokens, new.rows, HEADS=heads, BLOCK=block, K_DIM=k_dim,
        K_PADDED=triton.next_power_of_2(k_dim), V_DIM=v_dim, V_PADDED=triton.next_power_of_2(v_dim),
        EXTEND=extending, RESIDUAL=ring.window.residual_length, SINKS=ring.window.sinks,
    )  # fmt: skip


def _attend_copies(
    grid: tuple[int, ...], q: Tensor, keys: KernelSide, values: KernelSide, q_indptr: Tensor, indptr: Tensor,
    partial: Tensor, lse: Tensor, scores: ScoreScaling, num_splits: int, num_requests: int, window: WindowReads,
    **facts: Any,
) -> None:  # fmt: skip
    ring = window.ring
    attend_copies[grid](
        q, q.stride(0), q.stride(1), ring.keys, ring.values, ring.positions, window.requests, q_indptr, indptr,
        partial, lse, scores.scale * LOG2_E, scores.logit_cap * LOG2_E, num_splits, num_requests,
        HEADS=keys.num_heads, GQA=q.shape[1] // keys.num_heads, TOKENS=COPIED_TOKENS, K_DIM=keys.head_dim,
        K_PADDED=keys.padded, V_DIM=values.head_dim, V_PADDED=values.padded, CAPPED=scores.logit_cap > 0,
        **window_constants(window), **facts,
    )  # fmt: skip


def window_constants(window: WindowReads | None) -> Facts:
    """The constants of an exact window; zeros without one."""
    if window is None:
        return {"RESIDUAL": 0, "SINKS": 0}
    return {"RESIDUAL": window.ring.window.residual_length, "SINKS": window.ring.window.sinks}


def tiles_of(num_queries: int, num_requests: int, gqa: int, tile: int) -> int:
    """Tiles of all requests' pairs of query and head, however the queries are shared among them."""
    return num_queries * gqa // tile + num_requests


def fresh_options(keys: KernelSide, values: KernelSide) -> dict[str, int]:
    """The compiler options of the kernel of new tokens."""
    # The accumulator of a wide head needs the registers of more warps.
    return {"num_warps": 8 if max(keys.padded, values.padded) > 128 else 4, "num_stages": 2}


def read(side: KernelSide, slots: Tensor, count: Tensor, out: Tensor) -> None:
    """Read the first `count` [1] of token slots [tokens] back to model space, into `out` [tokens, heads, head_dim]."""
    if not len(slots):
        return
    read_side[(triton.cdiv(len(slots), READ_TOKENS), side.num_heads)](
        side.rows, side.words, side.mu, side.lam, slots, out, out.stride(0), out.stride(1), count,
        **read_facts(side), **EXACT,
    )  # fmt: skip


def read_to_places(
    keys: KernelSide, values: KernelSide, slots: Tensor, places: Tensor, count: Tensor, k: Tensor, v: Tensor
) -> None:
    """Read the first `count` [1] of token slots [tokens] back to places [tokens] of `k` and `v`."""
    if not len(slots):
        return
    read_joined[(triton.cdiv(len(slots), READ_TOKENS), keys.num_heads, 2)](
        keys.rows, keys.words, keys.mu, keys.lam, k, k.stride(0), k.stride(1), values.rows, values.words, v,
        v.stride(0), v.stride(1), slots, places, count, **read_layer_facts(keys, values), **EXACT,
    )  # fmt: skip


def read_layer_facts(keys: KernelSide, values: KernelSide) -> Facts:
    """The constants of kernels that read both sides of a layer back."""
    facts: Facts = {"HEADS": keys.num_heads, "TOKENS": READ_TOKENS}
    for name, side in (("K", keys), ("V", values)):
        facts |= {f"{name}_{key}": value for key, value in read_facts(side).items() if key not in facts}
    return facts


def read_facts(side: KernelSide) -> Facts:
    """The read kernel's constants."""
    return {
        "HEADS": side.num_heads, "ROW": side.row, "DIM": side.head_dim, "BITS": side.bits, "GROUPS": side.groups,
        "STEPS": side.steps, "PADDED": side.padded, "WORD": side.word_bits, "TOKEN_GROUP": side.token_group,
        "TOKENS": READ_TOKENS,
    }  # fmt: skip


def prepare(
    q: Tensor, keys: KernelSide, launch: DecodeLaunch, scratch: Scratch, *, biased: bool
) -> tuple[Tensor, Tensor]:
    """Queries in the space of stored keys, and q . mu; `q` itself where it is both."""
    if not (biased or changes_queries(keys.steps)):
        return q, q
    queries = scratch.take(q.shape, torch.float16)
    bias = scratch.take(q.shape[:2], torch.float32) if biased else q
    gqa = q.shape[1] // keys.num_heads
    tiles = triton.cdiv(gqa, prepared_heads(gqa, keys.padded))
    prepare_queries[(len(q), keys.num_heads * tiles)](
        q, q.stride(0), q.stride(1), keys.lam, keys.mu, queries, bias, HEADS=keys.num_heads,
        GQA=gqa, DIM=keys.head_dim, PADDED=keys.padded, STEPS=keys.steps, BIASED=biased,
        DEPENDENT=launch.dependent, **launch.launch_options,
    )  # fmt: skip
    return queries, bias


def _attend_rows(
    q: Tensor, queries: Tensor, bias: Tensor, keys: KernelSide, values: KernelSide, indptr: Tensor,
    slots: Tensor, scores: ScoreScaling, launch: DecodeLaunch, num_splits: int, scratch: Scratch, *, num_requests: int,
    biased: bool, bounds: ExtendBounds | None = None, window: WindowReads | None = None, exact_parts: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Partial outputs [queries, num_heads, parts, v_head_dim] and their weights [queries, num_heads, parts]."""
    num_queries, num_heads = q.shape[:2]
    gqa, extending = num_heads // keys.num_heads, bounds is not None
    parts = num_splits + exact_parts  # with room for those of model space
    partial = scratch.take((num_queries, num_heads, parts, values.head_dim), torch.float32)
    lse = scratch.take((num_queries, num_heads, parts), torch.float32)
    if bounds is None:
        grid = (launch.programs(keys.num_heads, gqa), num_splits, num_requests)
    else:
        grid = (keys.num_heads * tiles_of(num_queries, num_requests, gqa, launch.tile), num_splits, 1)
    decode_split[grid](
        queries, queries.stride(0), queries.stride(1), indptr if bounds is None else bounds.tokens, keys.rows,
        keys.words, values.rows, values.words, bias, indptr, slots, indptr if window is None else window.requests,
        indptr if window is None else window.ring.positions, partial, lse, scores.scale * LOG2_E,
        scores.logit_cap * LOG2_E, num_splits, num_requests, EXTEND=extending, CAPPED=scores.logit_cap > 0,
        BIASED=biased, EXACT_PARTS=exact_parts, **launch.options, **window_constants(window),
        **decode_facts(keys, values, gqa, launch),
    )  # fmt: skip
    return partial, lse


def merge(
    partial: Tensor, lse: Tensor, q_indptr: Tensor, values: KernelSide, launch: DecodeLaunch, num_splits: int,
    num_requests: int, out: Tensor, scores: ScoreScaling, *, extend: bool, exact_parts: int,
) -> None:  # fmt: skip
    """Merge the parts of all outputs into `out`; `q_indptr` counts rows where each request has one query."""
    extra: Facts = {} if scores.sink_scores is None else {"sink_ptr": scores.sink_scores.float().contiguous()}
    if values.has_constants:
        extra |= {"mu_ptr": values.mu, "lam_ptr": values.lam}
    merge_splits[(len(out), out.shape[1])](
        partial, lse, q_indptr, out, out.stride(0), out.stride(1), num_splits, num_requests, DIM=values.head_dim,
        PADDED=values.padded, STEPS=values.steps, EXTEND=extend, EXACT_PARTS=exact_parts,
        **merge_facts(launch, num_splits), **extra, **launch.launch_options,
    )  # fmt: skip


def merge_facts(launch: DecodeLaunch, num_splits: int) -> Facts:
    """The constants of the merge that follow from how rows are split, the same for every number of requests."""
    return {
        "SPLITS": MERGED_SPLITS, "MOST_SPLITS": triton.next_power_of_2(max(num_splits, MOST_SPLITS)),
        "MIN_SPLIT": launch.min_split, "TOKENS": launch.tokens, "DEPENDENT": launch.dependent,
    }  # fmt: skip
