"""The KV pool of one rank: every layer's keys and values as packed rows of their own width.

At start it is tested, and announced in the log and in metrics.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from kvtuner.errors import ServingError
from kvtuner.layer_ranges import write_ranges
from kvtuner.precision import NATIVE_BITS, PrecisionPair
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import rank_formats
from kvtuner.runtime_loader.sglang.compat.metrics import set_gauge
from kvtuner.runtime_loader.sglang.compat.parallel import ranks
from kvtuner.runtime_loader.sglang.compat.pool import KvBufferDesc, MHATokenToKVPool, allocation, write_slots
from kvtuner.runtime_loader.sglang.process_state import process_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.row_format import RowFormat
    from kvtuner.runtime_loader.sglang.compat.parallel import ParallelRanks
    from kvtuner.runtime_loader.sglang.process_state import RankServing

TESTED_TOKENS: Final = 16
"""More than one, whatever the page size: attention over one token is that token's value."""
MANY_TOKENS: Final = 1 << 14
"""The number of new tokens for which a prefix is worth reading back."""

logger: Final = logging.getLogger("kvtuner")


class PackedKVPool(MHATokenToKVPool):  # type: ignore[misc]  # sglang is not typed
    """SGLang's dense pool with packed rows: `keys` and `values` by layer of this rank.

    `k_buffer` and `v_buffer` are their tensors, [slots, row_bytes] uint8 or, at 16 bits, [slots, heads, channels] in
    `model_dtype`; scales lie in the rows, so that whoever moves a row moves its scales.
    """

    def __init__(self, *args: Any, dtype: torch.dtype, **kwargs: Any) -> None:
        if kwargs.get("post_capture_active") or kwargs.get("enable_kv_cache_copy"):
            raise ServingError("a packed KV pool can be neither resized after capture nor moved by drafts")
        self.model_dtype = dtype
        self.serving = process_state().serving_of_rank()
        # On CUDA, models whose kernels write straight into a bf16 pool go through `set_kv_buffer` at any other dtype.
        super().__init__(*args, dtype=torch.uint8, **kwargs)
        self_test(self)
        announce(self, ranks())

    def _create_buffers(self) -> None:
        here = ranks()
        layers = range(self.start_layer, self.start_layer + self.layer_num)
        formats = rank_formats(self.serving.profile, layers, tp_rank=here.tp_rank, tp_size=here.tp_size)
        heads = {entry.k.num_heads for entry in formats}
        if heads != {self.head_num}:
            raise ServingError(f"SGLang gives this rank {self.head_num} KV heads, the profile {heads.pop()}")
        with allocation(self):
            self.keys = [self._rows(entry.k) for entry in formats]
            self.values = [self._rows(entry.v) for entry in formats]
        # Under the names of SGLang's dense pool, so that what it inherits finds rows to copy and move.
        self.k_buffer = [stored.rows for stored in self.keys]
        self.v_buffer = [stored.rows for stored in self.values]
        self.k_scale_buffer = self.v_scale_buffer = None
        self.native_k_scale_buffer = self.native_v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self.store_dtype = torch.uint8
        self._kv_buffer_descs = self._build_kv_buffer_descs()
        self._init_data_ptrs_and_strides()

    def _rows(self, row_format: RowFormat) -> PackedRows:
        is_native = row_format.spec is None
        shape = (row_format.num_heads, row_format.head_dim) if is_native else (row_format.row_bytes(self.model_dtype),)
        dtype = self.model_dtype if is_native else torch.uint8
        slots = self.size + self.page_size
        return PackedRows(torch.zeros((slots, *shape), dtype=dtype, device=self.device), row_format)

    def _build_kv_buffer_descs(self) -> list[Any]:
        return [
            KvBufferDesc(f"{side}{layer}", tuple(rows.shape), row_bytes=rows[0].nbytes, tokens_per_row=1)
            for side, buffers in (("k", self.k_buffer), ("v", self.v_buffer))
            for layer, rows in enumerate(buffers)
        ]

    def get_key_buffer(self, layer_id: int) -> PackedRows:
        """Return the keys of a layer by its global id, once a pending transfer has brought them."""
        return self._at(self.keys, layer_id)

    def get_value_buffer(self, layer_id: int) -> PackedRows:
        """Return the values of a layer by its global id, once a pending transfer has brought them."""
        return self._at(self.values, layer_id)

    def _at(self, stored: Sequence[PackedRows], layer_id: int) -> PackedRows:
        local: int = layer_id - self.start_layer
        # A host tier may still be loading the layer.
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(local)
        return stored[local]

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor, k_scale: float | None = None,
        v_scale: float | None = None, layer_id_override: int | None = None, dcp_kv_mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Store keys and values [tokens, heads, channels] at token slots."""
        # The checkpoint's scales for an fp8 cache are not used: rows have their own.
        if dcp_kv_mask is not None:
            raise ServingError("a packed KV pool does not share tokens among ranks")
        local = (layer.layer_id if layer_id_override is None else layer_id_override) - self.start_layer
        keys, values = self.keys[local], self.values[local]
        self.serving.attention.store(
            keys, values, write_slots(loc_info), cache_k.view(-1, *keys.shape[1:]), cache_v.view(-1, *values.shape[1:])
        )

    def as_stored(self, layer_id: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What a reader of this layer's rows would see of fresh keys and values [tokens, heads, channels]."""

        def read(stored: PackedRows, fresh: Tensor) -> Tensor:
            states = fresh.view(-1, *stored.shape[1:])
            return stored.format.unpack(stored.format.pack(states), torch.float32)

        local = layer_id - self.start_layer
        return read(self.keys[local], k), read(self.values[local], v)

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copy rows, scales included, from slots to slots in every layer."""
        for rows in (*self.k_buffer, *self.v_buffer):
            rows[tgt_loc] = rows[src_loc]

    def set_kv_buffer_prefix_valid(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse what drafts alone call."""
        raise ServingError("speculative decoding does not work with a packed KV pool; drop --speculative-algorithm")

    def get_device_pool_infos(self) -> NoReturn:
        """Refuse a host pool of rows of one width, which would be made from this."""
        raise ServingError("SGLang's own host pools cannot hold packed rows; report this, with the server's flags")


def self_test(pool: PackedKVPool) -> None:
    """Store keys and values by the backend in use, attend to them, and refuse what differs from `quant.py`."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.arange(min(TESTED_TOKENS, pool.size), device=pool.device)
    for layer_id, (keys, values) in enumerate(zip(pool.keys, pool.values, strict=True), pool.start_layer):

        def states(shape: tuple[int, ...]) -> Tensor:
            return torch.randn((len(slots), *shape[1:]), generator=generator).to(pool.device, pool.model_dtype)

        heads, k_dim = pool.serving.gqa * keys.format.num_heads, keys.format.head_dim
        q, k, v = states((0, heads, k_dim)), 4 * states(keys.shape), 4 * states(values.shape)
        pool.serving.attention.store(keys, values, slots, k, v)
        for name, stored, fresh in (("keys", keys, k), ("values", values, v)):
            if not torch.equal(stored.rows[slots], stored.format.pack(fresh)):
                raise _failed(pool, f"{name} of layer {layer_id} are not stored as quant.py stores them")
        if not _reads_right(pool.serving, q, keys, values, slots):
            raise _failed(pool, f"attention of layer {layer_id} is not attention over what its rows hold")
        # As SGLang allocates a pool.
        for stored in (keys, values):
            stored.rows[slots] = torch.zeros_like(stored.rows[slots])


def _reads_right(serving: RankServing, q: Tensor, keys: PackedRows, values: PackedRows, slots: Tensor) -> bool:
    """Whether the first query, by decoding and as a new token behind a prefix, reads what quant.py reads of rows.

    And the prefix alone, where the implementation reads it back.
    """
    # Heads and dtypes are those of serving, so that a kernel is compiled here and not for the first request.
    attention, one = serving.attention, q[:1]
    k, v = (stored.format.unpack(stored.rows[slots], torch.float32) for stored in (keys, values))
    gqa = serving.gqa
    products = torch.einsum("qhd,khd->hqk", one.float(), k.repeat_interleave(gqa, dim=1))
    ends = torch.tensor([0, len(slots)], dtype=torch.int32, device=slots.device)
    # The new token is the last that was stored: as a prefix of one less and itself, nearly the same is read.
    prefix, last = slots[:-1], slots[-1:]
    new_k, new_v = (stored.read(last, one.dtype) for stored in (keys, values))
    bounds = ExtendBounds(
        torch.tensor([0, 1], device=slots.device), ends - (ends > 0).to(ends.dtype), prefix, longest=1
    )
    read_back = attention.read_prefix(one, keys, values, replace(bounds, longest=MANY_TOKENS))
    for stored, states in zip((keys, values), read_back or (), strict=read_back is not None):
        if not torch.equal(states[: len(prefix)], stored.read(prefix, one.dtype)):
            return False
    for cap in sorted({0.0, serving.logit_cap}):
        scores = ScoreScaling(keys.shape[-1] ** -0.5, cap)
        weights = torch.softmax(scores(products), dim=-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(gqa, dim=1))
        tolerance = max({torch.float32: 1e-4, torch.float16: 1e-2}.get(one.dtype, 4e-2), 16 * attention.rounding)
        tolerance *= expected.abs().max().item()
        decoded = attention.decode(one, keys, values, ends, slots, scores)
        extended = attention.extend(one, new_k, new_v, keys, values, bounds, scores)
        if any(bool(((output.float() - expected).abs() > tolerance).any()) for output in (decoded, extended)):
            return False
    return True


def _failed(pool: PackedKVPool, what: str) -> ServingError:
    return ServingError(
        f"the self-test of {pool.serving.attention.name} failed: {what}; report this, and serve without a profile"
    )


def announce_capacity(available_bytes: int, num_tokens: int) -> None:
    """Say what the memory that SGLang leaves for the pool is good for, before --max-total-tokens caps it."""
    logger.info("%s bytes are available for the KV cache: %s tokens", f"{available_bytes:,}", f"{num_tokens:,}")


def announce(pool: PackedKVPool, ranks: ParallelRanks) -> None:
    """Say in the log what this rank stores, and set its metrics."""
    serving, profile = pool.serving, pool.serving.profile
    # Of the tensors themselves, not of the profile: what is logged is what is stored.
    pairs = {
        layer_id: PrecisionPair(keys.format.bits, values.format.bits)
        for layer_id, (keys, values) in enumerate(zip(pool.keys, pool.values, strict=True), pool.start_layer)
    }
    bytes_per_token = sum(stored.rows[0].nbytes for stored in (*pool.keys, *pool.values))
    bf16_bytes = NATIVE_BITS // 8 * sum(math.prod(stored.shape[1:]) for stored in (*pool.keys, *pool.values))
    bf16_tokens = pool.size * bytes_per_token // bf16_bytes
    lines = [
        f"KV cache of rank {ranks.world_rank} (TP {ranks.tp_rank}/{ranks.tp_size}, stage {ranks.pp_rank})"
        f" by profile {profile.digest} of {profile.model.id}",
        f"  attention {serving.attention.name}, attend {serving.attend}, self-test passed",
        f"  {bytes_per_token:,} bytes per token, {bf16_bytes:,} in bf16 ({bf16_bytes / bytes_per_token:.2f}x)",
        f"  {pool.size:,} tokens, in bytes that hold {bf16_tokens:,} in bf16",
        f"  {write_ranges(pairs.values(), start=pool.start_layer)}",
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
    how = {"model": profile.model.id, "attention": serving.attention.name, "attend": serving.attend}
    set_gauge("kvtuner_info", "How this rank serves the profile.", {**rank, **how}, 1)
    for layer_id, pair in pairs.items():
        for side, bits in (("k", pair.k_bits), ("v", pair.v_bits)):
            labels = {**rank, "layer": str(layer_id), "side": side}
            set_gauge("kvtuner_kv_bits", "Bits of a layer's keys or values.", labels, bits)
