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
from kvtuner.runtime_loader.kernels.launch_settings import Device
from kvtuner.runtime_loader.kernels.scratch import Scratch
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
        self._device = Device.of(device)
        self._sides: WeakKeyDictionary[PackedRows, KernelSide] = WeakKeyDictionary()
        self._scratch = Scratch(0, device)

    def prepare(self, layers: list[tuple[PackedRows, PackedRows]], num_heads: int, max_requests: int) -> None:
        """See `PackedAttention.prepare`."""
        kinds = set()
        for (keys, values), few_or_many in itertools.product(layers, (1, None)):
            settings, tiles = self._settings(self._side(keys), self._side(values), num_heads, few_or_many)
            kinds.add((settings, tiles, keys.format.head_dim, values.format.head_dim))
        most = max(
            num_requests * ((self._device.splits(settings, num_requests, tiles) + 1) * (v_head_dim + 1) + head_dim + 1)
            for settings, tiles, head_dim, v_head_dim in kinds
            for num_requests in range(1, min(max_requests, MOST_PREPARED) + 1)
        )
        self._scratch = Scratch(torch.float32.itemsize * num_heads * most + SPARE_BYTES, layers[0][0].rows.device)

    def store(self, keys: PackedRows, values: PackedRows, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See `PackedAttention.store`."""
        if keys.format.token_group > 1:
            self.store_side(keys, slots, k)
            self.store_side(values, slots, v)
        else:
            launch.store(self._side(keys), self._side(values), slots, _dense(k), _dense(v))

    def store_side(self, stored: PackedRows, slots: Tensor, states: Tensor) -> None:
        """See `PackedAttention.store_side`: whole groups per channel in torch, as self-tests alone store them."""
        if stored.format.token_group > 1:
            stored.write(slots, states)
        else:
            launch.store_one(self._side(stored), slots, _dense(states))

    def store_groups(
        self, keys: PackedRows, ring: ExactRing, new: NewTokens, slots: Tensor, chunk: NewKeys | None = None
    ) -> None:
        """See `PackedAttention.store_groups`: without waiting for the device, which knows what is full."""
        if chunk is not None:
            chunk = replace(chunk, states=_dense(chunk.states))
        launch.store_groups_of(self._side(keys), ring, new, slots, chunk)

    def store_copies(self, ring: ExactRing, new: NewTokens, k: Tensor, v: Tensor) -> None:
        """See `PackedAttention.store_copies`."""
        launch.copy_tokens(ring, new, _dense(k), _dense(v))

    def decode(
        self, q: Tensor, keys: PackedRows, values: PackedRows, indptr: Tensor, slots: Tensor, scores: ScoreScaling,
        out: Tensor | None = None, window: WindowReads | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PackedAttention.decode`."""
        k_side, v_side = self._side(keys), self._side(values)
        settings, tiles = self._settings(k_side, v_side, q.shape[1], len(q))
        out = _output(q, values) if out is None else out
        if len(q):
            num_splits, scratch = self._device.splits(settings, len(q), tiles), self._scratch.restart()
            settings = self._device.for_batch(settings, len(q), tiles)
            launch.decode(_dense(q), k_side, v_side, indptr, slots, scores, settings, num_splits, scratch, out, window)
        return out

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds,
        scores: ScoreScaling, out: Tensor | None = None, window: WindowReads | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PackedAttention.extend`: attention over rows is merged with that of new tokens over one another."""
        k_side, v_side = self._side(keys), self._side(values)
        num_requests, gqa = len(bounds.tokens) - 1, q.shape[1] // k_side.num_heads
        settings = self._device.launch(k_side, v_side, gqa, extend=True)
        out = _output(q, values) if out is None else out
        if num_requests == 0:
            return out.zero_()
        if len(q):
            tiles = k_side.num_heads * launch.tiles_of(len(q), num_requests, gqa, settings.tile)
            num_splits = self._device.splits(settings, 1, tiles, least=1)
            launch.extend(
                _dense(q), _dense(k.to(q.dtype)), _dense(v.to(q.dtype)), k_side, v_side, bounds, scores,
                settings, num_splits, self._scratch.restart(), out, window,
            )  # fmt: skip
        return out

    def read(self, stored: PackedRows, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """See `PackedAttention.read`: by one launch, without waiting for the device."""
        out = torch.empty((len(slots), *stored.shape[1:]), dtype=dtype, device=slots.device)
        launch.read(
            self._side(stored), slots, torch.full((1,), len(slots), dtype=torch.int32, device=slots.device), out
        )
        return out

    def read_prefix(
        self, q: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds, chunk: JoinedChunk | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """See `PackedAttention.read_prefix`: long extends, of prefixes that fit in the workspace."""
        num_kv_heads, num_slots = keys.format.num_heads, len(bounds.slots)
        per_token = num_kv_heads * (keys.format.head_dim + values.format.head_dim) * q.dtype.itemsize
        if num_slots * per_token > WORKSPACE_BYTES:
            return None
        num_requests, pairs = len(bounds.tokens) - 1, bounds.longest * (q.shape[1] // num_kv_heads)
        # SGLang's own kernel is taken to have a program for every query head and HOST_TOKENS new tokens: too few leave
        # a device idle.
        programs = num_requests * q.shape[1] * triton.cdiv(bounds.longest, HOST_TOKENS)
        if num_slots and (pairs < WORTH_READING or 2 * programs < self._device.processors):
            return None
        num_places = num_slots if chunk is None else chunk.num_places
        k, v = (q.new_empty(max(1, num_places), *stored.shape[1:]) for stored in (keys, values))
        if chunk is not None:
            places = chunk.prefix_places
            launch.read_to_places(self._side(keys), self._side(values), bounds.slots, places, bounds.prefix[-1:], k, v)
            return k, v
        for stored, out in ((keys, k), (values, v)):
            launch.read(self._side(stored), bounds.slots, bounds.prefix[-1:], out)
        return k, v

    def _settings(
        self, keys: KernelSide, values: KernelSide, num_heads: int, num_requests: int | None
    ) -> tuple[DecodeLaunch, int]:
        """Return how rows are read, and the programs that a part of one query takes."""
        gqa = num_heads // keys.num_heads
        settings = self._device.launch(keys, values, gqa, num_requests=num_requests)
        return settings, settings.programs(keys.num_heads, gqa)

    def _side(self, stored: PackedRows) -> KernelSide:
        side = self._sides.get(stored)
        if side is None:
            side = self._sides[stored] = KernelSide.of(stored)
        return side


def _output(q: Tensor, values: PackedRows) -> Tensor:
    return q.new_empty(len(q), q.shape[1], values.format.head_dim)


def _dense(states: Tensor) -> Tensor:
    """Return the same states with channels side by side, as kernels read them."""
    return states if states.stride(-1) == 1 else states.contiguous()
