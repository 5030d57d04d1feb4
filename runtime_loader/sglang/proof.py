"""What a rank says at start of how it stores its cache: one block in the log, a self-test, and metrics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import torch

from kvtuner.errors import ServingError
from kvtuner.precision import NATIVE_BITS, PrecisionPair
from kvtuner.runtime_loader.sglang.compat.metrics import set_gauge

if TYPE_CHECKING:
    from kvtuner.runtime_loader.packed_attention import StoredRows
    from kvtuner.runtime_loader.sglang.compat.parallel import Ranks
    from kvtuner.runtime_loader.sglang.pool import PackedKVPool

logger: Final = logging.getLogger("kvtuner")


def self_test(pool: PackedKVPool) -> None:
    """Write known keys and values through the implementation in use, compare the rows with `quant.py`'s, clear them.

    Raises:
        ServingError: names the first layer whose rows differ.
    """
    generator = torch.Generator().manual_seed(0)
    slots = torch.arange(pool.page_size, device=pool.device)
    for local, (keys, values) in enumerate(zip(pool.keys, pool.values, strict=True)):
        written = []
        for stored in (keys, values):
            states = torch.randn((pool.page_size, *stored.shape[1:]), generator=generator)
            written.append((4 * states).to(pool.device, pool.model_dtype))
        pool.serving.attention.store(keys, values, slots, *written)
        for name, stored, states in (("keys", keys, written[0]), ("values", values, written[1])):
            if not torch.equal(stored.rows[slots], stored.format.pack(states)):
                raise ServingError(
                    f"the self-test of {pool.serving.attention.name} failed: {name} of layer {local + pool.start_layer}"
                    " are not stored as quant.py stores them; report this, and serve without a profile"
                )
            stored.rows[slots] = torch.zeros_like(stored.rows[slots])


def announce(pool: PackedKVPool, ranks: Ranks) -> None:
    """Say in the log what this rank stores, and set its metrics."""
    profile = pool.serving.profile
    bytes_per_token = bytes_of_a_token(pool)
    unquantized = sum(_native_bytes(stored, pool.model_dtype) for stored in (*pool.keys, *pool.values))
    lines = [
        f"KV cache of rank {ranks.world_rank} (TP {ranks.tp_rank}/{ranks.tp_size}, stage {ranks.pp_rank})"
        f" by profile {profile.digest} of {profile.model.id}",
        f"  attention {pool.serving.attention.name}, attend {pool.serving.attend}, self-test passed",
        f"  {bytes_per_token:,} bytes per token, {unquantized:,} in {str(pool.model_dtype).removeprefix('torch.')}"
        f" ({unquantized / bytes_per_token:.2f}x)",
        f"  {pool.size:,} tokens in bytes that hold {pool.size * bytes_per_token // unquantized:,} unquantized",
        f"  {layer_ranges(pool)}",
    ]
    logger.info("\n".join(lines))
    labels = {"digest": profile.digest, "tp_rank": str(ranks.tp_rank), "pp_rank": str(ranks.pp_rank)}
    gauges = {
        "kvtuner_kv_bytes_per_token": ("Stored bytes of one token on this rank.", bytes_per_token),
        "kvtuner_kv_bytes_per_token_unquantized": ("The same in the served dtype.", unquantized),
        "kvtuner_kv_capacity_tokens": ("Tokens that the pool holds.", pool.size),
    }
    for name, (what, value) in gauges.items():
        set_gauge(name, what, labels, value)


def bytes_of_a_token(pool: PackedKVPool) -> int:
    """Stored bytes of one token on this rank, of the tensors themselves."""
    return sum(stored.rows[0].nbytes for stored in (*pool.keys, *pool.values))


def _native_bytes(stored: StoredRows, dtype: torch.dtype) -> int:
    _, heads, channels = stored.shape
    return heads * channels * dtype.itemsize


def layer_ranges(pool: PackedKVPool) -> str:
    """Bits of this rank's layers by their global ids, such as ``0:K8V8,1-6:K4V2``."""
    pairs = [
        PrecisionPair(keys.format.bits, values.format.bits) for keys, values in zip(pool.keys, pool.values, strict=True)
    ]
    ranges: list[tuple[int, int, PrecisionPair]] = []
    for layer_id, pair in enumerate(pairs, pool.start_layer):
        if ranges and ranges[-1][2] == pair:
            ranges[-1] = (ranges[-1][0], layer_id, pair)
        else:
            ranges.append((layer_id, layer_id, pair))
    return ",".join(f"{first if first == last else f'{first}-{last}'}:{_name(pair)}" for first, last, pair in ranges)


def _name(pair: PrecisionPair) -> str:
    return "bf16" if pair.k_bits == pair.v_bits == NATIVE_BITS else str(pair)
