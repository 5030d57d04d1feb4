"""Launches of the kernels that write rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton

from kvtuner.precision import NATIVE_BITS, num_slots
from kvtuner.runtime_loader.kernels.keys.store_groups import store_groups
from kvtuner.runtime_loader.kernels.launch_settings import EXACT
from kvtuner.runtime_loader.kernels.storing.store_rows import store_rows
from kvtuner.runtime_loader.kernels.transform_steps import LANES

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.exact_ring import ExactRing, NewTokens
    from kvtuner.runtime_loader.kernels.kernel_side import Facts, KernelSide
    from kvtuner.runtime_loader.packed_attention import NewKeys

STORED_TOKENS: Final = 8
"""The tokens that a program stores where four lanes share each."""
PACKED_UNITS: Final = 16
"""The units of a program that packs keys per channel."""


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
    lanes = min((side.stored_lanes for side in (keys, values) if side.bits != NATIVE_BITS), default=LANES.value)
    facts: Facts = {"HEADS": keys.num_heads, "TOKENS": STORED_TOKENS * LANES.value // lanes}
    for name, side in (("K", keys), ("V", values)):
        own = {
            "ROW": side.row, "DIM": side.head_dim, "BITS": side.bits, "GROUPS": side.groups, "STEPS": side.steps,
            "SYMMETRIC": side.symmetric, "FITTED": side.fitted, "PADDED": side.padded,
            "WORD": side.word_bits,
        }  # fmt: skip
        facts |= {f"{name}_{key}": value for key, value in own.items()}
    return facts
