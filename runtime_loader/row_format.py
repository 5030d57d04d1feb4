"""The packing of one layer's keys or values into rows, on one rank. Knows nothing of caches, pools or read plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from kvtuner.errors import ProfileError
from kvtuner.geometry import kv_heads_of_rank
from kvtuner.layer_ranges import write_layers
from kvtuner.precision import NATIVE_BITS, row_bytes
from kvtuner.quant import QuantSpec, by_token, encode_fp8, saturated
from kvtuner.row_packing import pack_rows, pack_token_groups, unpack_rows, unpack_token_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.layer_geometry import LayerGeometry
    from kvtuner.precision import Side

BLOCK_TOKENS: Final = 2048
"""Tokens packed or read back at a time, whole groups: bounds the float32 copies that either makes."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The packing of keys or values of one rank's KV heads into rows.

    Without a `spec` they keep [tokens, num_heads, head_dim] and the dtype that they come in. The spec of fp8, which no
    profile asks for, stores a byte for each channel and no scales. Per channel, rows are packed and read in whole
    groups of `spec.token_group` tokens.
    """

    num_heads: int
    head_dim: int
    spec: QuantSpec | None

    @property
    def bits(self) -> int:
        """The bits of a code; 16 for native rows, whatever their dtype."""
        return NATIVE_BITS if self.spec is None else self.spec.bits

    @property
    def token_group(self) -> int:
        """The tokens that are packed and read together: those that share a scale of a channel, or one."""
        return 1 if self.spec is None else self.spec.token_group

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's row; `dtype` is that of native rows."""
        if self.spec is None:
            return self.num_heads * self.head_dim * dtype.itemsize
        if self.spec.fp8:
            return self.num_heads * self.head_dim
        spec = self.spec
        heads, channels = self.num_heads, self.head_dim
        if spec.token_group > 1:
            return row_bytes(heads, channels, spec.bits, spec.token_group, granularity="per_channel")
        return row_bytes(heads, channels, spec.bits, spec.group_size, word_bits=spec.word_bits)

    def pack(self, states: Tensor) -> Tensor:
        """Rows uint8 [..., tokens, row_bytes] of [..., tokens, num_heads, head_dim]; native ones as they are."""
        if self.spec is None:
            return states
        return torch.cat([_pack(self.spec, block) for block in states.split(BLOCK_TOKENS, dim=-3)], dim=-2)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or values [..., tokens, num_heads, head_dim] of rows, in model space."""
        if self.spec is None:
            return rows.to(dtype)
        transform = self.spec.transform
        blocks = [
            saturated(transform.invert(self.unpack_stored(block)), dtype) for block in rows.split(BLOCK_TOKENS, dim=-2)
        ]
        return torch.cat(blocks, dim=-3)

    def unpack_stored(self, rows: Tensor) -> Tensor:
        """Keys or values [..., tokens, num_heads, head_dim], float32, in the space that they are stored in."""
        if self.spec is None:
            return rows.to(torch.float32)
        spec = self.spec
        if spec.fp8:
            states: Tensor = rows.view(torch.float8_e4m3fn).unflatten(-1, (self.num_heads, self.head_dim))
            return states.to(torch.float32)
        heads, channels = self.num_heads, self.head_dim
        if spec.token_group > 1:
            return by_token(unpack_token_groups(rows, spec.bits, heads, channels, spec.token_group).dequantize())
        return unpack_rows(rows, spec.bits, heads, channels, spec.group_size, word_bits=spec.word_bits).dequantize()


def _pack(spec: QuantSpec, states: Tensor) -> Tensor:
    if spec.fp8:
        return encode_fp8(states).view(torch.uint8).flatten(-2)
    quantized = spec.quantize(states)
    return pack_token_groups(quantized) if spec.token_group > 1 else pack_rows(quantized)


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """The formats of the rows of one layer on one rank; a latent has them as keys, its rotary channels as values."""

    k: RowFormat
    v: RowFormat
    is_latent: bool = False

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values; `dtype` is that of native rows."""
        return self.k.row_bytes(dtype) + self.v.row_bytes(dtype)


def rank_formats(
    profile: Profile, layers: Sequence[int], *, tp_rank: int = 0, tp_size: int = 1
) -> tuple[LayerFormat, ...]:
    """The storage, on one of `tp_size` ranks, of full layers, such as those of its stage, given by their global ids.

    Heads that cannot be split so are a `GeometryError`; layers that the profile does not have, or full ones that
    differ in heads or channels, are a `ProfileError`.
    """
    geometry = profile.tuned_geometry()
    if not layers or not set(layers) <= set(geometry.ids):
        served = f"{layers[0]} to {layers[-1]}" if layers else "that are none"
        raise ProfileError(
            f"the profile has full layers {write_layers(geometry.ids)}, but this rank serves layers {served};"
            " use a profile that was searched for this model"
        )
    heads = geometry.kv_heads_of_rank(tp_rank, tp_size)
    dims = {"k": geometry.head_dim, "v": geometry.rope_dim if geometry.is_latent else geometry.v_head_dim}

    def side(layer_id: int, name: Side) -> RowFormat:
        spec = profile.quant_spec(layer_id, name)
        if spec is not None:
            spec = replace(spec, transform=spec.transform.heads(heads.start, heads.stop))
        return RowFormat(len(heads), dims[name], spec)

    return tuple(LayerFormat(side(layer_id, "k"), side(layer_id, "v"), geometry.is_latent) for layer_id in layers)


def pool_formats(
    profile: Profile, layers: Sequence[int], *, tp_rank: int = 0, tp_size: int = 1
) -> tuple[LayerFormat, ...]:
    """The storage of layers that share a pool, full ones as by `rank_formats` and those with a window unquantized.

    Errors are those of `rank_formats`.
    """
    windows = {layer_id: layer for layer_id, layer in profile.geometry.owners().items() if layer.kind.name == "window"}
    full = [layer_id for layer_id in layers if layer_id not in windows]
    packed = iter(rank_formats(profile, full, tp_rank=tp_rank, tp_size=tp_size))

    def native(layer: LayerGeometry) -> LayerFormat:
        heads = len(kv_heads_of_rank(layer.num_kv_heads, tp_rank, tp_size))
        return LayerFormat(RowFormat(heads, layer.head_dim, None), RowFormat(heads, layer.v_head_dim, None))

    return tuple(native(windows[layer_id]) if layer_id in windows else next(packed) for layer_id in layers)
