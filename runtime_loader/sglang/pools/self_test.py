"""The self-test of a pool, which compares its rows with `quant.py`, and its first report in log and metrics."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from kvtuner.errors import ServingError
from kvtuner.layer_ranges import write_layers, write_ranges
from kvtuner.precision import PrecisionPair
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedAttention, PackedRows, ScoreScaling
from kvtuner.runtime_loader.sglang.compat.metrics import set_gauge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.sglang.compat.parallel import ParallelRanks
    from kvtuner.runtime_loader.sglang.pools.packed_pool import PackedPool

TESTED_TOKENS: Final = 16
"""The tokens of the test, more than one whatever the page size: attention over one token is that token's value."""
WORTH_A_WARNING: Final = 0.25
"""The copies' share of the rows' bytes above which fewer requests are recommended."""
MANY_TOKENS: Final = 1 << 14
"""The number of new tokens for which a prefix is worth reading back."""

logger: Final = logging.getLogger("kvtuner")


def self_test(pool: PackedPool) -> None:
    """Store keys and values by the backend in use, attend to them, and refuse what differs from `quant.py`."""
    generator = torch.Generator().manual_seed(0)
    slots = tested_slots(pool.keys)
    read = {layer_id for layer_id, _, _ in pool.read_layers}
    for layer_id, keys, values in zip(pool.layer_ids, pool.keys, pool.values, strict=True):

        def states(shape: tuple[int, ...]) -> Tensor:
            return torch.randn((len(slots), *shape[1:]), generator=generator).to(pool.device, pool.model_dtype)

        k, v = 4 * states(keys.shape), 4 * states(values.shape)
        heads, channels = pool.rank_state.gqa * keys.format.num_heads, pool.read_states(k, v)[0].shape[-1]
        q = states((0, heads, channels))
        pool.rank_state.attention.store(keys, values, slots, k, v)
        for name, stored, fresh in (("keys", keys, k), ("values", values, v)):
            if not torch.equal(stored.rows[slots], stored.format.pack(fresh)):
                raise failed(pool, f"{name} of layer {layer_id} are not stored as quant.py stores them")
        if layer_id in read and not _reads_right(pool, q, keys, values, slots):
            raise failed(pool, f"attention of layer {layer_id} is not attention over what its rows hold")
        # As SGLang allocates a pool.
        for stored in (keys, values):
            stored.rows[slots] = torch.zeros_like(stored.rows[slots])


def tested_slots(keys: Sequence[PackedRows]) -> Tensor:
    """The first token slots of layers, which their test takes: of keys per channel a whole group."""
    tokens = max(TESTED_TOKENS, *(stored.format.token_group for stored in keys))
    return torch.arange(min(tokens, len(keys[0].rows)), device=keys[0].rows.device)


def _reads_right(pool: PackedPool, q: Tensor, keys: PackedRows, values: PackedRows, slots: Tensor) -> bool:
    """Whether the first query, by decoding and as a new token behind a prefix, reads what quant.py reads of rows.

    And the tokens alone, and the prefix alone where the implementation reads it back.
    """
    # Heads and dtypes are those of serving, so that a kernel is compiled here and not for the first request.
    rank, attention, one = pool.rank_state, pool.rank_state.attention, q[:1]
    k, v = pool.read_states(*(stored.format.unpack(stored.rows[slots], torch.float32) for stored in (keys, values)))
    gqa = rank.gqa
    products = torch.einsum("qhd,khd->hqk", one.float(), k.repeat_interleave(gqa, dim=1))
    ends = torch.tensor([0, len(slots)], dtype=torch.int32, device=slots.device)
    # The new token is the last that was stored: as a prefix of one less and itself, nearly the same is read.
    prefix, last = slots[:-1], slots[-1:]
    new_k, new_v = (stored.read(last, one.dtype) for stored in (keys, values))
    bounds = ExtendBounds(
        torch.tensor([0, 1], device=slots.device), ends - (ends > 0).to(ends.dtype), prefix, longest=1
    )
    for stored in (keys, values):
        alone = attention.read(stored, slots, one.dtype)
        if not torch.equal(alone, stored.read(slots, alone.dtype)):
            return False
    read_back = attention.read_prefix(one, keys, values, replace(bounds, longest=MANY_TOKENS))
    wanted = pool.read_states(*(stored.read(prefix, one.dtype) for stored in (keys, values)))
    for states, right in zip(read_back or (), wanted, strict=read_back is not None):
        if not torch.equal(states[: len(prefix)], right):
            return False
    sinks = torch.linspace(-2, 2, products.shape[0], device=slots.device) if rank.has_sinks else None
    for cap in sorted({0.0, rank.logit_cap}):
        scores = ScoreScaling(keys.shape[-1] ** -0.5, cap, sinks)
        weights = weights_of(scores(products), sinks)
        expected = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(gqa, dim=1))
        allowed = tolerance(attention, one.dtype) * expected.abs().max().item()
        decoded = attention.decode(one, keys, values, ends, slots, scores)
        extended = attention.extend(one, new_k, new_v, keys, values, bounds, scores)
        if any(bool(((output.float() - expected).abs() > allowed).any()) for output in (decoded, extended)):
            return False
    return True


def weights_of(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The weights of scores [num_heads, queries, tokens] beside those of attention sinks [num_heads], if any."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    beside = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)), dim=-1)
    return torch.softmax(beside, dim=-1)[..., :-1]


def tolerance(attention: PackedAttention, dtype: torch.dtype) -> float:
    """The error that attention in a served dtype may have, as a part of its largest output."""
    return max({torch.float32: 1e-4, torch.float16: 1e-2}.get(dtype, 4e-2), 16 * attention.rounding)


def failed(pool: PackedPool, what: str) -> ServingError:
    """The refusal of a pool whose self-test failed."""
    return ServingError(
        f"the self-test of {pool.rank_state.attention.name} failed: {what}; report this, and serve without a profile"
    )


def announce_capacity(
    rows_bytes: int, copies_bytes: int, workspace_bytes: int, num_tokens: int, window_tokens: int
) -> None:
    """Say what the memory that SGLang leaves for the pool is good for, before --max-total-tokens caps it."""
    beside = f" and {window_tokens:,} of layers with a window" if window_tokens else ""
    beside += f", beside {copies_bytes:,} bytes for the exact copies" if copies_bytes else ""
    beside += f"; attention works in {workspace_bytes:,} more" if workspace_bytes else ""
    logger.info("%s bytes are available for the KV cache: %s tokens%s", f"{rows_bytes:,}", f"{num_tokens:,}", beside)
    if copies_bytes > rows_bytes * WORTH_A_WARNING:
        logger.warning(
            "kvtuner: exact copies take %s of %s bytes; a smaller --max-running-requests leaves more for rows",
            f"{copies_bytes:,}", f"{rows_bytes + copies_bytes:,}",
        )  # fmt: skip


def announce_window_layers(layer_ids: Sequence[int], num_tokens: int, num_bytes: int) -> None:
    """Say in the log what the layers with a window take that SGLang keeps in a part of the pool of their own."""
    logger.info(
        "layers %s have windows, in a part of their own as SGLang stores them: %s tokens, %s bytes",
        write_layers(layer_ids), f"{num_tokens:,}", f"{num_bytes:,}",
    )  # fmt: skip


def announce_states(num_states: int, num_bytes: int) -> None:
    """Say in the log what the states of layers without keys take, which SGLang keeps in a pool of their own."""
    logger.info("layers without keys have %s states each, %s bytes in all", f"{num_states:,}", f"{num_bytes:,}")


def announce_index(layers: Sequence[bool], num_bytes: int) -> None:
    """Say in the log what the keys of an index take, which SGLang keeps itself in some of the layers."""
    logger.info("keys of the index of %d of %d layers take %s bytes", sum(layers), len(layers), f"{num_bytes:,}")


def announce_window(pool: PackedPool, ranks: ParallelRanks) -> None:
    """Say in the log what the copies of an exact window take, and set their metrics, 0 without one."""
    copies, profile = pool.copies, pool.rank_state.profile
    rank = {"digest": profile.digest, "tp_rank": str(ranks.tp_rank), "pp_rank": str(ranks.pp_rank)}
    gauges = {
        "kvtuner_window_bytes": ("Bytes of exact copies on this rank.", copies.num_bytes if copies else 0),
        "kvtuner_window_tokens": ("Tokens of a request that have a copy, at most.", profile.window.num_tokens),
    }
    for name, (what, value) in gauges.items():
        set_gauge(name, what, rank, value)
    if copies is not None:
        logger.info(
            "exact copies of rank %d: %s, %s bytes for each of %d request slots, %s in all", ranks.world_rank,
            profile.window, f"{copies.num_bytes // copies.num_requests:,}", copies.num_requests,
            f"{copies.num_bytes:,}",
        )  # fmt: skip


def announce(pool: PackedPool, ranks: ParallelRanks) -> None:
    """Say in the log what this rank stores, and set its metrics."""
    state, profile = pool.rank_state, pool.rank_state.profile
    # Of the tensors themselves, not of the profile: what is logged is what is stored.
    sides = profile.tuned_geometry().sides
    pairs = {
        layer_id: PrecisionPair(keys.format.bits, (values if "v" in sides else keys).format.bits)
        for layer_id, keys, values in zip(pool.layer_ids, pool.keys, pool.values, strict=True)
    }
    bytes_per_token, bf16_bytes = pool.bytes_per_token
    bf16_tokens = pool.size * bytes_per_token // bf16_bytes
    lines = [
        f"KV cache of rank {ranks.world_rank} (TP {ranks.tp_rank}/{ranks.tp_size}, stage {ranks.pp_rank})"
        f" by profile {profile.digest} of {profile.model.id}",
        f"  attention {state.attention.name}, attend {state.attend}, self-test passed",
        f"  {bytes_per_token:,} bytes per token, {bf16_bytes:,} in bf16 ({bf16_bytes / bytes_per_token:.2f}x)",
        f"  {pool.size:,} tokens, in bytes that hold {bf16_tokens:,} in bf16",
        f"  {write_ranges(pairs.values(), ids=pairs)}",
    ]
    logger.info("\n".join(lines))
    rank = {"digest": profile.digest, "tp_rank": str(ranks.tp_rank), "pp_rank": str(ranks.pp_rank)}
    gauges = {
        "kvtuner_kv_bytes_per_token": ("Stored bytes of one token on this rank.", bytes_per_token),
        "kvtuner_kv_bytes_per_token_bf16": ("The same in bf16.", bf16_bytes),
        "kvtuner_kv_capacity_tokens": ("Tokens that the pool holds.", pool.size),
        "kvtuner_kv_capacity_tokens_bf16": ("Tokens that its bytes would hold in bf16.", bf16_tokens),
    }
    for name, (what, value) in gauges.items():
        set_gauge(name, what, rank, value)
    how = {"model": profile.model.id, "attention": state.attention.name, "attend": state.attend}
    set_gauge("kvtuner_info", "How this rank serves the profile.", {**rank, **how}, 1)
    for layer_id, pair in pairs.items():
        for side, bits in zip(sides, (pair.k_bits, pair.v_bits), strict=False):  # a latent has the first alone
            labels = {**rank, "layer": str(layer_id), "side": side}
            set_gauge("kvtuner_kv_bits", "Bits of a layer's keys or values.", labels, bits)
