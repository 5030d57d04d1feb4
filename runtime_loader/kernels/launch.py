"""Launches of the kernels that read two sides of a layer, and of those that copy tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import triton

from kvtuner.runtime_loader.kernels.decode import decode_split
from kvtuner.runtime_loader.kernels.extend_and_merge import attend_fresh, merge_splits
from kvtuner.runtime_loader.kernels.launch_settings import EXACT, LOG2_E, MOST_SPLITS, WIDE
from kvtuner.runtime_loader.kernels.queries import prepare_queries, prepared_heads
from kvtuner.runtime_loader.kernels.read_rows import read_joined, read_side
from kvtuner.runtime_loader.kernels.transform_steps import changes_queries
from kvtuner.runtime_loader.kernels.window import attend_copies, store_copies

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.exact_ring import ExactRing, NewTokens, WindowReads
    from kvtuner.runtime_loader.kernels.kernel_side import Facts, KernelSide
    from kvtuner.runtime_loader.kernels.launch_settings import DecodeLaunch
    from kvtuner.runtime_loader.kernels.scratch import Scratch
    from kvtuner.runtime_loader.packed_attention import ExtendBounds, ScoreScaling

READ_TOKENS: Final = 16
"""The tokens of a program that reads them back, fewer where `READ_CHANNELS` are more channels than they have."""
READ_CHANNELS: Final = 4096
MERGED_SPLITS: Final = 16
FRESH: Final = {"TILE": 64, "TOKENS": 32}
"""The pairs of query and head, and the tokens, of a program that attends to new tokens."""
COPIED_TOKENS: Final = 32
"""The places of a block, of those who copy tokens."""


@dataclass(frozen=True, slots=True)
class LayerSides:
    """What kernels read of a layer: its keys and values."""

    keys: KernelSide
    values: KernelSide

    @property
    def fresh(self) -> dict[str, int]:
        """The sizes of a program that attends to new tokens or copies."""
        return FRESH

    @property
    def exact_facts(self) -> Facts:
        """The constants of kernels that attend in model space."""
        return {
            "K_DIM": self.keys.head_dim, "K_PADDED": self.keys.padded, "V_DIM": self.values.head_dim,
            "V_PADDED": self.values.padded, "ROTARY_DIM": 0, "ROTARY_PADDED": WIDE,
        }  # fmt: skip

    @property
    def exact_options(self) -> dict[str, int]:
        """The compiler options of these kernels for chunks of new tokens."""
        # The accumulator of a wide head needs the registers of more warps.
        return {"num_warps": 8 if max(self.keys.padded, self.values.padded) > 128 else 4, "num_stages": 2}

    @property
    def copies_options(self) -> dict[str, int]:
        """The same where requests have one new token."""
        return {"num_warps": 4}

    def exact(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The keys and values of states, and the rotary channels beside them; any tensor where there are none."""
        return k, v, v

    def attend_rows(
        self, grid: tuple[int, ...], q: Tensor, queries: Tensor, q_indptr: Tensor, batch: tuple[Any, ...],
        launch: DecodeLaunch, options: Facts,
    ) -> None:  # fmt: skip
        """Launch the kernel that reads rows for queries of stored space, made of `q`; `_attend_rows` has the rest."""
        decode_split[grid](
            queries, queries.stride(0), queries.stride(1), q_indptr, self.keys.rows, self.keys.words,
            self.values.rows, self.values.words, *batch, **options,
            **decode_facts(self.keys, self.values, q.shape[1] // self.keys.num_heads, launch),
        )  # fmt: skip


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
    q: Tensor, layer: LayerSides, indptr: Tensor, slots: Tensor, scores: ScoreScaling, launch: DecodeLaunch,
    num_splits: int, scratch: Scratch, out: Tensor, window: WindowReads | None = None,
) -> None:  # fmt: skip
    """Attention of one query per request over packed rows, in at most `num_splits` parts of a request.

    As `PackedAttention.decode`; `indptr` may be longer than [requests + 1]; channels of `q` and `out` are contiguous.
    """
    # Softmax cancels it where all keys are rows.
    biased = layer.keys.centered and (scores.logit_cap > 0 or window is not None or scores.sink_scores is not None)
    parts = int(window is not None)
    partial, lse = _attend_rows(
        q, layer, indptr, slots, scores, launch, num_splits, scratch, num_requests=len(q), biased=biased,
        window=window, exact_parts=parts,
    )  # fmt: skip
    if window is not None:
        grid = (layer.keys.num_heads * triton.cdiv(q.shape[1] // layer.keys.num_heads, WIDE), 1, len(q))
        _attend_copies(
            grid, q, layer, indptr, indptr, partial, lse, scores, num_splits, len(q), window, TILE=WIDE,
            EXTEND=False, EXACT_PARTS=1, PART=0, **layer.copies_options,
        )  # fmt: skip
    merge(
        partial, lse, indptr, layer.values, launch, num_splits, len(q), out, scores, extend=False, exact_parts=parts
    )  # fmt: skip


def extend(
    q: Tensor, k: Tensor, v: Tensor, layer: LayerSides, bounds: ExtendBounds, scores: ScoreScaling,
    launch: DecodeLaunch, num_splits: int, scratch: Scratch, out: Tensor, window: WindowReads | None = None,
) -> None:  # fmt: skip
    """Attention of new tokens over their request's packed rows and over one another, causally or by a mask.

    As `PackedAttention.extend`; channels of all tensors are contiguous, `k` and `v` have the dtype of `q`, and `out`
    gets zeros for tokens of no request.
    """
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
    # Parts are merged by the sums of their exponents, so that q . mu, which cached keys alone have lost, is added to
    # what rows say; the values' transform is undone on their part alone.
    partial, lse = _attend_rows(
        q, layer, bounds.prefix, bounds.slots, scores, launch, num_splits, scratch, num_requests=num_requests,
        biased=layer.keys.centered, bounds=bounds, window=window, exact_parts=parts,
    )  # fmt: skip
    gqa, tile = q.shape[1] // layer.keys.num_heads, layer.fresh["TILE"]
    grid = (layer.keys.num_heads * tiles_of(len(q), num_requests, gqa, tile),)
    for part, (reads, *states) in enumerate(fresh):
        new_k, new_v, rotary = layer.exact(*states)
        attend_fresh[grid](
            q, q.stride(0), q.stride(1), new_k, new_k.stride(0), new_k.stride(1), new_v, new_v.stride(0),
            new_v.stride(1), rotary, rotary.stride(0), bounds.tokens, bounds.prefix, mask, starts, partial, lse,
            scores.scale * LOG2_E, scores.logit_cap * LOG2_E, num_splits, num_requests, HEADS=layer.keys.num_heads,
            GQA=gqa, CAPPED=scores.logit_cap > 0, READS=reads, PART=part, EXACT_PARTS=parts, **layer.fresh,
            **layer.exact_facts, **window_constants(window), **layer.exact_options,
        )  # fmt: skip
    if window is not None:
        _attend_copies(
            grid, q, layer, bounds.tokens, bounds.prefix, partial, lse, scores, num_splits, num_requests, window,
            TILE=tile, EXTEND=True, EXACT_PARTS=parts, PART=parts - 1, **layer.exact_options,
        )  # fmt: skip
    merge(
        partial, lse, bounds.tokens, layer.values, launch, num_splits, num_requests, out, scores, extend=True,
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
    grid: tuple[int, ...], q: Tensor, layer: LayerSides, q_indptr: Tensor, indptr: Tensor, partial: Tensor,
    lse: Tensor, scores: ScoreScaling, num_splits: int, num_requests: int, window: WindowReads, **facts: Any,
) -> None:  # fmt: skip
    ring = window.ring
    attend_copies[grid](
        q, q.stride(0), q.stride(1), *layer.exact(ring.keys, ring.values), ring.positions, window.requests, q_indptr,
        indptr, partial, lse, scores.scale * LOG2_E, scores.logit_cap * LOG2_E, num_splits, num_requests,
        HEADS=layer.keys.num_heads, GQA=q.shape[1] // layer.keys.num_heads, TOKENS=layer.fresh["TOKENS"],
        CAPPED=scores.logit_cap > 0, **layer.exact_facts, **window_constants(window), **facts,
    )  # fmt: skip


def window_constants(window: WindowReads | None) -> Facts:
    """The constants of an exact window; zeros without one."""
    if window is None:
        return {"RESIDUAL": 0, "SINKS": 0}
    return {"RESIDUAL": window.ring.window.residual_length, "SINKS": window.ring.window.sinks}


def tiles_of(num_queries: int, num_requests: int, gqa: int, tile: int) -> int:
    """Tiles of all requests' pairs of query and head, however the queries are shared among them."""
    return num_queries * gqa // tile + num_requests


def read(side: KernelSide, slots: Tensor, count: Tensor, out: Tensor) -> None:
    """Read the first `count` [1] of token slots [tokens] back to model space, into `out` [tokens, heads, head_dim]."""
    if not len(slots):
        return
    facts = read_facts(side)
    read_side[(triton.cdiv(len(slots), facts["TOKENS"]), side.num_heads)](
        side.rows, side.words, side.mu, side.lam, slots, out, out.stride(0), out.stride(1), count,
        **facts, **EXACT,
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
        "TOKENS": min(READ_TOKENS, READ_CHANNELS // side.padded),
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
    q: Tensor, layer: LayerSides, indptr: Tensor, slots: Tensor, scores: ScoreScaling, launch: DecodeLaunch,
    num_splits: int, scratch: Scratch, *, num_requests: int, biased: bool, bounds: ExtendBounds | None = None,
    window: WindowReads | None = None, exact_parts: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Partial outputs [queries, num_heads, parts, v_head_dim] and their weights [queries, num_heads, parts]."""
    keys = layer.keys
    num_queries, num_heads = q.shape[:2]
    gqa, extending = num_heads // keys.num_heads, bounds is not None
    queries, bias = prepare(q[..., : keys.head_dim], keys, launch, scratch, biased=biased)
    parts = num_splits + exact_parts  # with room for those of model space
    partial = scratch.take((num_queries, num_heads, parts, layer.values.head_dim), torch.float32)
    lse = scratch.take((num_queries, num_heads, parts), torch.float32)
    grid = (launch.programs(keys.num_heads, gqa), num_splits, num_requests)
    if extending:
        grid = (keys.num_heads * tiles_of(num_queries, num_requests, gqa, launch.tile), num_splits, 1)
    batch = (
        bias, indptr, slots, indptr if window is None else window.requests,
        indptr if window is None else window.ring.positions, partial, lse, scores.scale * LOG2_E,
        scores.logit_cap * LOG2_E, num_splits, num_requests,
    )  # fmt: skip
    options = {
        "EXTEND": extending, "CAPPED": scores.logit_cap > 0, "BIASED": biased, "EXACT_PARTS": exact_parts,
        **launch.options, **window_constants(window),
    }  # fmt: skip
    q_indptr = indptr if bounds is None else bounds.tokens
    layer.attend_rows(grid, q, queries, q_indptr, batch, launch, options)
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
