"""Packed rows stored, decoded and read back by Triton kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import triton

from kvtuner.runtime_loader.kernels.decode import decode_split, merge_splits, prepare_queries
from kvtuner.runtime_loader.kernels.read import read_side
from kvtuner.runtime_loader.kernels.store import store_rows

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.kernels.side import Facts, KernelSide
    from kvtuner.runtime_loader.packed_attention import Scores

TILE: Final = 16
"""Query heads of a program: the least that a tensor core takes."""
STORED_TOKENS: Final = 4
READ_TOKENS: Final = 16
EXACT: Final[dict[str, Any]] = {"enable_fp_fusion": False, "num_warps": 4}
"""Compiler options of kernels that round as `quant.py` does: a product and a sum stay two roundings."""
LOG2_E: Final = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """How the decode kernel is launched.

    Attributes:
        tokens: of a block.
        warps: of a program.
        stages: of its pipeline.
        asm: unpack by inline assembly of NVIDIA's.
        min_split: tokens below which a request is not split.
    """

    tokens: int
    warps: int
    stages: int
    asm: bool
    min_split: int = 256


LAUNCH: Final = DecodeLaunch(tokens=64, warps=1, stages=3, asm=True)
"""Of sm_80 and later, for every pair of packed widths."""


def store(keys: KernelSide, values: KernelSide, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write keys and values [tokens, num_heads, head_dim], channels contiguous, to token slots [tokens]."""
    num_tokens, num_heads = k.shape[:2]
    if not num_tokens:
        return
    store_rows[(triton.cdiv(num_tokens, STORED_TOKENS), num_heads, 2)](
        k, k.stride(0), k.stride(1), keys.rows, keys.mu, keys.inverse,
        v, v.stride(0), v.stride(1), values.rows, slots, num_tokens,
        **store_facts(keys, values, num_heads), **EXACT,
    )  # fmt: skip


def store_facts(keys: KernelSide, values: KernelSide, num_heads: int) -> Facts:
    """The kernel's constants."""
    facts: Facts = {"HEADS": num_heads, "TOKENS": STORED_TOKENS}
    for name, side in (("K", keys), ("V", values)):
        own = {
            "ROW": side.row, "DIM": side.head_dim, "BITS": side.bits, "GROUPS": side.groups, "STAGES": side.stages,
            "SYMMETRIC": side.symmetric, "PADDED": side.padded,
        }  # fmt: skip
        facts |= {f"{name}_{key}": value for key, value in own.items()}
    return {**facts, "K_CENTERED": keys.centered, "K_BALANCED": keys.balanced}


def decode_facts(keys: KernelSide, values: KernelSide, num_kv_heads: int, gqa: int, launch: DecodeLaunch) -> Facts:
    """The decode kernel's constants, but for the logit cap."""
    facts: Facts = {
        "HEADS": num_kv_heads, "GQA": gqa, "TILE": TILE, "TOKENS": launch.tokens, "MIN_SPLIT": launch.min_split,
        "ASM": launch.asm, "ONES": 8,
    }  # fmt: skip
    for name, side in (("K", keys), ("V", values)):
        own = {"ROW": side.row, "DIM": side.head_dim, "BITS": side.bits, "GROUPS": side.groups, "UNITS": side.units}
        facts |= {f"{name}_{key}": value for key, value in own.items()}
    return facts


def decode(
    q: Tensor, keys: KernelSide, values: KernelSide, num_kv_heads: int, indptr: Tensor, slots: Tensor, scores: Scores,
    launch: DecodeLaunch, num_splits: int,
) -> Tensor:  # fmt: skip
    """Attention of one query per request over packed rows; as `PackedAttention.decode`.

    Args:
        q: [requests, num_heads, head_dim], channels contiguous.
        keys: of the layer.
        values: of the layer.
        num_kv_heads: of keys and values.
        indptr: [requests + 1]; request r reads ``slots[indptr[r]:indptr[r + 1]]``.
        slots: token slots of all requests, one after the other.
        scores: scale and cap.
        launch: settings of the kernel.
        num_splits: most parts of a request.
    """
    num_requests, num_heads, head_dim = q.shape
    gqa, capped = num_heads // num_kv_heads, scores.logit_cap > 0
    biased = capped and keys.centered
    dim = values.head_dim
    partial = torch.empty(num_requests, num_heads, num_splits, dim, dtype=torch.float32, device=q.device)
    queries, bias = q, partial  # read only where they are made
    if keys.stages or keys.balanced or capped:
        queries = torch.empty(q.shape, dtype=q.dtype if keys.bits == 16 else torch.float16, device=q.device)
        if capped:
            bias = torch.zeros(num_requests, num_heads, dtype=torch.float32, device=q.device)
        prepare_queries[(num_kv_heads, num_requests)](
            q, q.stride(0), q.stride(1), keys.lam, keys.mu, queries, bias, HEADS=num_kv_heads, GQA=gqa, DIM=head_dim,
            PADDED=keys.padded, BALANCED=keys.balanced, STAGES=keys.stages, BIASED=biased,
        )  # fmt: skip
    lse = torch.empty(num_requests, num_heads, num_splits, dtype=torch.float32, device=q.device)
    decode_split[(num_kv_heads * triton.cdiv(gqa, TILE), num_splits, num_requests)](
        queries, queries.stride(0), queries.stride(1), keys.rows, keys.words, values.rows, values.words, bias, indptr,
        slots, partial, lse, scores.scale * LOG2_E, scores.logit_cap * LOG2_E, num_splits, CAPPED=capped,
        num_warps=launch.warps, num_stages=launch.stages, **decode_facts(keys, values, num_kv_heads, gqa, launch),
    )  # fmt: skip
    out = torch.empty(num_requests, num_heads, dim, dtype=q.dtype, device=q.device)
    merge_splits[(num_heads, num_requests)](
        partial, lse, out, out.stride(0), out.stride(1), num_splits, DIM=dim, PADDED=values.padded,
        SPLITS=triton.next_power_of_2(num_splits), STAGES=values.stages,
    )  # fmt: skip
    return out


def read(side: KernelSide, num_kv_heads: int, slots: Tensor, out: Tensor) -> None:
    """Read token slots [tokens] back to model space, into `out` [tokens, num_kv_heads, head_dim]."""
    if not len(slots):
        return
    read_side[(triton.cdiv(len(slots), READ_TOKENS), num_kv_heads)](
        side.rows, side.words, side.mu, side.lam, slots, out, out.stride(0), out.stride(1), len(slots),
        HEADS=num_kv_heads, ROW=side.row, DIM=side.head_dim, BITS=side.bits, GROUPS=side.groups,
        CENTERED=side.centered, BALANCED=side.balanced, STAGES=side.stages, PADDED=side.padded, TOKENS=READ_TOKENS,
        **EXACT,
    )  # fmt: skip
