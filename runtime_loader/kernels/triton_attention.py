"""`PackedAttention` by Triton kernels."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch
import triton

from kvtuner.runtime_loader.kernels import NAME, launch
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.launch import LayerSides
from kvtuner.runtime_loader.kernels.launch_settings import Device
from kvtuner.runtime_loader.kernels.scratch import Scratch
from kvtuner.runtime_loader.kernels.storing import launch_store
from kvtuner.runtime_loader.workspaces import MOST_PREPARED, SPARE_BYTES, WORKSPACE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.exact_ring import ExactRing, NewTokens, WindowReads
    from kvtuner.runtime_loader.joined_chunk import JoinedChunk
    from kvtuner.runtime_loader.kernels.launch_settings import DecodeLaunch
    from kvtuner.runtime_loader.packed_attention import ExtendBounds, NewKeys, PackedRows, ScoreScaling

WORTH_READING: Final = 256
"""The pairs of query and head to a KV head from which a prefix is read back; docs/kernels.md says why."""
HOST_TOKENS: Final = 128
"""The new tokens of a program of SGLang's own kernel."""


class TritonAttention:
    """`PackedAttention` by kernels, for one rank's layers on one device."""

    # Nothing is measured, compiled differently or allocated for the length of a request, so that decoding can be
    # captured in a CUDA graph.
    name = NAME
    rounding = 2.0**-11

    def __init__(self, device: torch.device) -> None:
        self.device = Device.of(device)
        self._sides: WeakKeyDictionary[PackedRows, KernelSide] = WeakKeyDictionary()
        self._scratch = Scratch(0, device)

    def prepare(self, layers: list[tuple[PackedRows, PackedRows]], num_heads: int, max_requests: int) -> None:
        """See `PackedAttention.prepare`."""
        kinds = set()
        for (keys, values), few_or_many in itertools.product(layers, (1, None)):
            layer = self.sides(keys, values)
            settings = self.settings(layer, num_heads, num_requests=few_or_many)
            tiles = settings.programs(layer.keys.num_heads, num_heads // layer.keys.num_heads)
            kinds.add((settings, tiles, layer.keys.head_dim, layer.values.head_dim))
        most = max(  # parts with their weights, those of copies too, and queries in fp16 with their q . mu
            num_requests
            * (4 * (self.device.splits(settings, num_requests, tiles) + 1) * (v_head_dim + 1) + 2 * head_dim + 4)
            for settings, tiles, head_dim, v_head_dim in kinds
            for num_requests in range(1, min(max_requests, MOST_PREPARED) + 1)
        )
        self._scratch = Scratch(num_heads * most + SPARE_BYTES, layers[0][0].rows.device)

    def store(self, keys: PackedRows, values: PackedRows, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See `PackedAttention.store`."""
        if keys.format.token_group > 1:
            self.store_side(keys, slots, k)
            self.store_side(values, slots, v)
        else:
            launch_store.store(self.side(keys), self.side(values), slots, _dense(k), _dense(v))

    def store_side(self, stored: PackedRows, slots: Tensor, states: Tensor) -> None:
        """See `PackedAttention.store_side`: whole groups per channel in torch, as self-tests alone store them."""
        if stored.format.token_group > 1:
            stored.write(slots, states)
        else:
            launch_store.store_one(self.side(stored), slots, _dense(states))

    def store_groups(
        self, keys: PackedRows, ring: ExactRing, new: NewTokens, slots: Tensor, chunk: NewKeys | None = None
    ) -> None:
        """See `PackedAttention.store_groups`: without waiting for the device, which knows what is full."""
        if chunk is not None:
            chunk = replace(chunk, states=_dense(chunk.states))
        launch_store.store_groups_of(self.side(keys), ring, new, slots, chunk)

    def store_copies(self, ring: ExactRing, new: NewTokens, k: Tensor, v: Tensor) -> None:
        """See `PackedAttention.store_copies`."""
        launch.copy_tokens(ring, new, _dense(k), _dense(v))

    def decode(
        self, q: Tensor, keys: PackedRows, values: PackedRows, indptr: Tensor, slots: Tensor, scores: ScoreScaling,
        out: Tensor | None = None, window: WindowReads | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PackedAttention.decode`."""
        layer, num_heads = self.sides(keys, values), q.shape[1]
        settings = self.settings(layer, num_heads, num_requests=len(q))
        tiles = settings.programs(layer.keys.num_heads, num_heads // layer.keys.num_heads)
        out = _output(q, layer) if out is None else out
        if len(q):
            num_splits, scratch = self.device.splits(settings, len(q), tiles), self._scratch.restart()
            settings = self.device.for_batch(settings, len(q), tiles)
            launch.decode(_dense(q), layer, indptr, slots, scores, settings, num_splits, scratch, out, window)
        return out

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds,
        scores: ScoreScaling, out: Tensor | None = None, window: WindowReads | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PackedAttention.extend`: attention over rows is merged with that of new tokens over one another."""
        layer = self.sides(keys, values)
        num_requests, gqa = len(bounds.tokens) - 1, q.shape[1] // layer.keys.num_heads
        settings = self.settings(layer, q.shape[1], extend=True)
        out = _output(q, layer) if out is None else out
        if num_requests == 0:
            return out.zero_()
        if len(q):
            tiles = layer.keys.num_heads * launch.tiles_of(len(q), num_requests, gqa, settings.tile)
            num_splits = self.device.splits(settings, 1, tiles, least=1)
            launch.extend(
                _dense(q), _dense(k.to(q.dtype)), _dense(v.to(q.dtype)), layer, bounds, scores, settings, num_splits,
                self._scratch.restart(), out, window,
            )  # fmt: skip
        return out

    def read(self, stored: PackedRows, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """See `PackedAttention.read`: by one launch, without waiting for the device."""
        out = torch.empty((len(slots), *stored.shape[1:]), dtype=dtype, device=slots.device)
        launch.read(self.side(stored), slots, torch.full((1,), len(slots), dtype=torch.int32, device=slots.device), out)
        return out

    def read_prefix(
        self, q: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds, chunk: JoinedChunk | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """See `PackedAttention.read_prefix`: long extends, of prefixes that fit in the workspace."""
        if not self.is_worth_reading(q, keys, values, bounds, WORTH_READING, HOST_TOKENS):
            return None
        num_places = len(bounds.slots) if chunk is None else chunk.num_places
        k, v = (q.new_empty(max(1, num_places), *stored.shape[1:]) for stored in (keys, values))
        if chunk is not None:
            places = chunk.prefix_places
            launch.read_to_places(self.side(keys), self.side(values), bounds.slots, places, bounds.prefix[-1:], k, v)
            return k, v
        for stored, out in ((keys, k), (values, v)):
            launch.read(self.side(stored), bounds.slots, bounds.prefix[-1:], out)
        return k, v

    def is_worth_reading(
        self, q: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds, least_pairs: int, host_tokens: int
    ) -> bool:
        """Whether prefixes fit in the workspace, and are read by enough pairs of query and head to a KV head.

        SGLang's own kernel has a program for every query head and `host_tokens` new tokens.
        """
        num_kv_heads, num_slots = keys.format.num_heads, len(bounds.slots)
        per_token = num_kv_heads * (keys.format.head_dim + values.format.head_dim) * q.dtype.itemsize
        if num_slots * per_token > WORKSPACE_BYTES:
            return False
        num_requests, pairs = len(bounds.tokens) - 1, bounds.longest * (q.shape[1] // num_kv_heads)
        programs = num_requests * q.shape[1] * triton.cdiv(bounds.longest, host_tokens)  # too few leave a device idle
        return not num_slots or (pairs >= least_pairs and 2 * programs >= self.device.processors)

    def sides(self, keys: PackedRows, values: PackedRows) -> LayerSides:
        """What kernels read of a layer."""
        return LayerSides(self.side(keys), self.side(values))

    def settings(
        self, layer: LayerSides, num_heads: int, *, extend: bool = False, num_requests: int | None = None
    ) -> DecodeLaunch:
        """How the rows of a layer are read, as `Device.launch`."""
        gqa = num_heads // layer.keys.num_heads
        return self.device.launch(layer.keys, layer.values, gqa, extend=extend, num_requests=num_requests)

    def side(self, stored: PackedRows) -> KernelSide:
        """One side of a layer, prepared at its first use."""
        side = self._sides.get(stored)
        if side is None:
            side = self._sides[stored] = KernelSide.of(stored)
        return side


def _output(q: Tensor, layer: LayerSides) -> Tensor:
    return q.new_empty(len(q), q.shape[1], layer.values.head_dim)


def _dense(states: Tensor) -> Tensor:
    """Return the same states with channels side by side, as kernels read them."""
    return states if states.stride(-1) == 1 else states.contiguous()
