"""`PackedAttention` by Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch
import triton

from kvtuner.runtime_loader.kernels import launch
from kvtuner.runtime_loader.kernels.scratch import Scratch
from kvtuner.runtime_loader.kernels.settings import Device
from kvtuner.runtime_loader.kernels.side import KernelSide
from kvtuner.runtime_loader.packed_attention import PrefixStates

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.kernels.settings import DecodeLaunch
    from kvtuner.runtime_loader.packed_attention import ExtendBounds, Scores, StoredRows

WORKSPACE_BYTES: Final = 512 << 20
"""Most that a prefix takes when it is read back, keys and values: 128k tokens of Llama-3.1-8B."""
WORTH_READING: Final = 128
"""Pairs of query and head that share a KV head from which a prefix is read back: docs/kernels.md says why."""

SPARE_BYTES: Final = 4096
"""Of a scratch, for the alignment of its pieces."""


class TritonAttention:
    """`PackedAttention` by kernels, for one rank's layers on one device.

    Nothing is measured, compiled differently or allocated for the length of a request, so that decoding can be captured
    in a CUDA graph.

    Args:
        device: of the rows.

    Raises:
        ServingError: a device on which no kernel runs.
    """

    name = "triton"
    rounding = 2.0**-11

    def __init__(self, device: torch.device) -> None:
        self._device = Device.of(device)
        self._sides: WeakKeyDictionary[StoredRows, KernelSide] = WeakKeyDictionary()
        self._scratch = Scratch(0, device)

    def prepare(self, layers: list[tuple[StoredRows, StoredRows]], num_heads: int, max_requests: int) -> None:
        """See `PackedAttention.prepare`."""
        kinds = set()
        for keys, values in layers:
            settings, tiles = self._settings(self._side(keys), self._side(values), num_heads)
            kinds.add((settings, tiles, keys.format.head_dim, values.format.head_dim))
        most = max(
            num_requests * (self._device.splits(settings, num_requests, tiles) * (v_head_dim + 1) + head_dim + 1)
            for settings, tiles, head_dim, v_head_dim in kinds
            for num_requests in range(1, max_requests + 1)
        )
        self._scratch = Scratch(torch.float32.itemsize * num_heads * most + SPARE_BYTES, layers[0][0].rows.device)

    def store(self, keys: StoredRows, values: StoredRows, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See `PackedAttention.store`."""
        launch.store(self._side(keys), self._side(values), slots, _dense(k), _dense(v))

    def decode(
        self, q: Tensor, keys: StoredRows, values: StoredRows, indptr: Tensor, slots: Tensor, scores: Scores
    ) -> Tensor:
        """See `PackedAttention.decode`."""
        k_side, v_side = self._side(keys), self._side(values)
        settings, tiles = self._settings(k_side, v_side, q.shape[1])
        out = q.new_empty(len(q), q.shape[1], values.format.head_dim)
        if len(q):
            num_splits = self._device.splits(settings, len(q), tiles)
            launch.decode(
                _dense(q), k_side, v_side, indptr, slots, scores, settings, num_splits,
                self._scratch.restart(), out,
            )  # fmt: skip
        return out

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: StoredRows,
        values: StoredRows,
        bounds: ExtendBounds,
        scores: Scores,
    ) -> Tensor:
        """See `PackedAttention.extend`: what rows say and what new tokens say of one another, merged."""
        k_side, v_side = self._side(keys), self._side(values)
        settings, tiles = self._settings(k_side, v_side, q.shape[1], bounds.longest)
        out = q.new_empty(len(q), q.shape[1], values.format.head_dim)
        if len(q):
            num_splits = self._device.splits(settings, len(bounds.tokens) - 1, tiles)
            launch.extend(
                _dense(q), _dense(k.to(q.dtype)), _dense(v.to(q.dtype)), k_side, v_side, bounds, scores,
                settings, num_splits, self._scratch.restart(), out,
            )  # fmt: skip
        return out

    def read_prefix(self, q: Tensor, keys: StoredRows, values: StoredRows, bounds: ExtendBounds) -> PrefixStates | None:
        """See `PackedAttention.read_prefix`: a long extend of a prefix that fits in the workspace."""
        num_kv_heads = keys.format.num_heads
        per_token = num_kv_heads * (keys.format.head_dim + values.format.head_dim) * q.dtype.itemsize
        if len(bounds.slots) * per_token > WORKSPACE_BYTES:
            return None
        if len(bounds.slots) and bounds.longest * (q.shape[1] // num_kv_heads) < WORTH_READING:
            return None
        states = []
        for stored in (keys, values):
            out = q.new_empty(max(1, len(bounds.slots)), *stored.shape[1:])
            launch.read(self._side(stored), bounds.slots, bounds.prefix[-1:], out)
            states.append(out)
        return PrefixStates(states[0], states[1], torch.arange(len(bounds.slots), device=q.device))

    def _settings(
        self, keys: KernelSide, values: KernelSide, num_heads: int, num_queries: int = 1
    ) -> tuple[DecodeLaunch, int]:
        """How rows are read, and the programs that a part of one request's queries takes."""
        gqa = num_heads // keys.num_heads
        return self._device.launch(keys, values, gqa), keys.num_heads * triton.cdiv(num_queries * gqa, launch.TILE)

    def _side(self, stored: StoredRows) -> KernelSide:
        side = self._sides.get(stored)
        if side is None:
            side = self._sides[stored] = KernelSide.of(stored)
        return side


def _dense(states: Tensor) -> Tensor:
    """With channels side by side, as kernels read them."""
    return states if states.stride(-1) == 1 else states.contiguous()
