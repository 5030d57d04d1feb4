"""The launches that read packed latents, and their settings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
import triton

from kvtuner.errors import ServingError
from kvtuner.precision import WIDEST_PACKED_BITS
from kvtuner.runtime_loader.kernels.latents.decode_latents import decode_latents
from kvtuner.runtime_loader.kernels.launch import LOG2_E, merge, prepare
from kvtuner.runtime_loader.kernels.launch_settings import WIDE, DecodeLaunch

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.kernels.kernel_side import Facts, KernelSide
    from kvtuner.runtime_loader.kernels.scratch import Scratch
    from kvtuner.runtime_loader.packed_attention import ScoreScaling

INTERPRETED_LATENTS: Final = DecodeLaunch(
    tokens=32, warps=2, stages=1, asm=False, min_split=32, resident=1, tile=WIDE
)  # fmt: skip
"""The settings in Triton's interpreter: small blocks, so that short requests have several."""
_LARGE: Final = DecodeLaunch(tokens=128, warps=8, stages=3, asm=True, resident=1, tile=WIDE)
_SMALL: Final = DecodeLaunch(tokens=64, warps=4, stages=3, asm=True, resident=1, tile=WIDE)
_KIB: Final = {"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_120": 99}
"""The shared memory of a program (CUDA C++ Programming Guide, technical specifications)."""


def latent_launch(arch: str, bits: int) -> DecodeLaunch:
    """The settings of an architecture for latents of 512 channels: two blocks ahead where its shared memory holds them.

    They were compiled and counted (benchmarks/sass.py --latents), and never ran.

    Raises:
        ServingError: There are no settings for the architecture.
    """
    kib = _KIB.get(arch)
    if kib is None:
        raise ServingError(
            f"the kernel of latents has no settings for {arch}, only for {', '.join(_KIB)}; serve them on a processor"
        )
    if bits == WIDEST_PACKED_BITS:  # a block of 128 tokens is 80 KiB with rotary channels, beside queries and weights
        return _LARGE if kib > 200 else _SMALL if kib > 100 else replace(_SMALL, stages=2)
    return _LARGE if kib > 100 else _SMALL


def decode_of_latents(
    q: Tensor, latents: KernelSide, rotary: KernelSide, indptr: Tensor, slots: Tensor, scores: ScoreScaling,
    launch: DecodeLaunch, num_splits: int, scratch: Scratch, out: Tensor,
) -> None:  # fmt: skip
    """Attention of one absorbed query per request over packed latents, in at most `num_splits` parts of a request.

    As `PackedAttention.decode`: `q` is [requests, num_heads, latent + rotary channels] and `out` [requests, num_heads,
    latent channels], channels contiguous. Rotary channels are stored in the dtype that queries have.
    """
    num_requests, num_heads = q.shape[:2]
    latent_q, rotary_q = q.split((latents.head_dim, rotary.head_dim), dim=-1)
    # Softmax cancels it where all keys are rows.
    biased = latents.centered and (scores.logit_cap > 0 or scores.sink_scores is not None)
    queries, bias = prepare(latent_q, latents, launch, scratch, biased=biased)
    partial = scratch.take((num_requests, num_heads, num_splits, latents.head_dim), torch.float32)
    lse = scratch.take((num_requests, num_heads, num_splits), torch.float32)
    decode_latents[(triton.cdiv(num_heads, launch.tile), num_splits, num_requests)](
        queries, queries.stride(0), queries.stride(1), rotary_q, rotary_q.stride(0), rotary_q.stride(1), latents.rows,
        latents.words, rotary.rows, bias, indptr, slots, partial, lse, scores.scale * LOG2_E,
        scores.logit_cap * LOG2_E, num_splits, CAPPED=scores.logit_cap > 0, BIASED=biased, **launch.options,
        **latent_facts(latents, rotary, num_heads, launch),
    )  # fmt: skip
    merge(
        partial, lse, indptr, latents, launch, num_splits, num_requests, out, scores, extend=False, exact_parts=0
    )  # fmt: skip


def latent_facts(latents: KernelSide, rotary: KernelSide, num_heads: int, launch: DecodeLaunch) -> Facts:
    """The constants of `decode_latents`, but for what a call changes: CAPPED and BIASED."""
    return {
        "HEADS": num_heads, "TILE": launch.tile, "TOKENS": launch.tokens, "MIN_SPLIT": launch.min_split,
        "WARPS": launch.warps, "ROW": latents.row, "DIM": latents.head_dim, "BITS": latents.bits,
        "GROUPS": latents.groups, "UNITS": latents.units(1), "WORD": latents.word_bits, "ROTARY_ROW": rotary.row,
        "ROTARY_DIM": rotary.head_dim, "ROTARY_PADDED": rotary.units(1), "ASM": launch.asm,
        "DEPENDENT": launch.dependent,
    }  # fmt: skip
