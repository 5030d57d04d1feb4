"""`PackedAttention` over packed latents (MLA) by Triton kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.kernels.latents.launch_latents import MOST_LATENT_CHANNELS, LatentSides, latent_launch
from kvtuner.runtime_loader.kernels.launch import LayerSides, read
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.runtime_loader.joined_chunk import JoinedChunk
    from kvtuner.runtime_loader.kernels.launch_settings import DecodeLaunch
    from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows


READ_BACK_TOKENS: Final = 32
"""The new tokens of a request from which a prefix is read back: as many as a program of SGLang's own kernel has."""


class TritonLatentAttention(TritonAttention):
    """`PackedAttention` by kernels, whose tensors are those of `LatentAttention`.

    Latents stand as keys and rotary channels as values; `q` is [.., num_heads, latent + rotary channels], and outputs
    are sums of latents.
    """

    def sides(self, keys: PackedRows, values: PackedRows) -> LayerSides:
        """See `TritonAttention.sides`: latents, which are keys and values, and the rotary channels beside them."""
        if keys.format.head_dim > MOST_LATENT_CHANNELS:
            raise ServingError(
                f"the kernels read latents of at most {MOST_LATENT_CHANNELS} channels, not {keys.format.head_dim};"
                " serve without a profile"
            )
        return LatentSides.of(self.side(keys), self.side(values))

    def settings(
        self, layer: LayerSides, num_heads: int, *, extend: bool = False, num_requests: int | None = None
    ) -> DecodeLaunch:
        """See `TritonAttention.settings`: one query and several are read alike."""
        settings = latent_launch(self.device.arch, layer.keys.bits)
        return replace(settings, dependent=self.device.launches_dependents)

    def read_prefix(
        self, q: Tensor, keys: PackedRows, values: PackedRows, bounds: ExtendBounds, chunk: JoinedChunk | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """See `PackedAttention.read_prefix`: keys have both parts of a latent, and values are the first of these."""
        assert chunk is None, "SGLang's flash attention takes no heads of so many channels"
        if not self.is_worth_reading(q, keys, values, bounds, READ_BACK_TOKENS * q.shape[1], READ_BACK_TOKENS):
            return None
        channels = keys.format.head_dim
        both = q.new_empty(max(1, len(bounds.slots)), 1, channels + values.format.head_dim)
        for stored, out in ((keys, both[..., :channels]), (values, both[..., channels:])):
            read(self.side(stored), bounds.slots, bounds.prefix[-1:], out)
        return both, both[..., :channels]
