"""Latents of multi-head latent attention (MLA) on their way to the cache, by which keys and values are made anew.

Such a layer gives its cache a latent and rotary channels, and expands what the cache gives back into the keys and
values of all heads. So it is given something in place of a cache, which notes both; its attention then finds them here.
No model class is named. Knows nothing of quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kvtuner.errors import UnsupportedModelError
from kvtuner.quant import saturated

if TYPE_CHECKING:
    from torch import nn

    from kvtuner.calibration.forward.read_plan import AttentionCall
    from kvtuner.layer_geometry import LayerGeometry

CACHE_ARGUMENT: Final = "past_key_values"
"""The argument in which transformers gives a layer its cache."""
_EXPAND: Final = "expand_kv"
"""The method of an attention module that makes keys and values of what its cache gives back."""
Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_noted: ContextVar[tuple[int, Tensor, Tensor] | None] = ContextVar("kvtuner_latent", default=None)


@dataclass(frozen=True, slots=True)
class LatentRows:
    """What a layer with a latent caches of some tokens, and how keys and values are made of it.

    Attributes:
        rows: The latents [batch, 1, tokens, channels].
        rope: The rotary channels beside them [batch, 1, tokens, rope_dim], positions encoded.
        expand: The function from both to keys and values, [batch, num_heads, tokens, channels] each.
    """

    rows: Tensor
    rope: Tensor
    expand: Expand

    def detached(self) -> LatentRows:
        """The same without gradients."""
        return replace(self, rows=self.rows.detach(), rope=self.rope.detach())

    def first(self, tokens: int) -> LatentRows:
        """A copy of the first tokens."""
        return replace(self, rows=self.rows[:, :, :tokens].clone(), rope=self.rope[:, :, :tokens].clone())

    def after(self, prompt: LatentRows) -> LatentRows:
        """These tokens behind those of a prompt."""
        rows, rope = (torch.cat(parts, dim=2) for parts in ((prompt.rows, self.rows), (prompt.rope, self.rope)))
        return replace(self, rows=rows, rope=rope)

    def expanded(self, rows: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens with other latents, as they are read back, and maybe other rotary channels.

        Latents are float32 [..., 1, tokens, channels]; dimensions before the batch's are kept.
        """
        rope = self.rope if rope is None else saturated(rope, self.rope.dtype)
        lead = rows.shape[:-4]
        flat = saturated(rows, self.rows.dtype).reshape(-1, *rows.shape[-3:])
        beside = rope.expand(*lead, *rope.shape).reshape(-1, *rope.shape[-3:])
        keys, values = self.expand(flat, beside)
        return keys.unflatten(0, (*lead, -1)), values.unflatten(0, (*lead, -1))

    def query_maps(self) -> Tensor:
        """What a head's queries are multiplied by to be products with a latent, [num_heads, channels, head_dim].

        Keys are linear in the latent: those of unit latents, without rotary channels, are the map.
        """
        channels = self.rows.shape[-1]
        unit = torch.eye(channels, dtype=self.rows.dtype, device=self.rows.device)[None, None]
        none = torch.zeros((1, 1, channels, self.rope.shape[-1]), dtype=self.rope.dtype, device=self.rope.device)
        keys: Tensor = self.expand(unit, none)[0][0]
        return keys.to(torch.float32)


class LatentRecorder:
    """What a layer with a latent is given in place of a cache: it notes what comes, and gives it back as it is.

    Attributes:
        index_dim: The channels of the keys of the layer's index; 0 while it gave none.
    """

    def __init__(self) -> None:
        self.index_dim = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Note the latent and the rotary channels of a layer's tokens for the attention that follows."""
        _noted.set((layer_idx, key_states, value_states))
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Note the channels of the keys of a layer's index, [batch, tokens, channels]."""
        self.index_dim = indexer_key_states.shape[-1]
        return indexer_key_states


def noted_latent(module: nn.Module, layer_id: int) -> LatentRows | None:
    """The latent that the layer of an attention module noted since the last attention; None where there is none."""
    noted = _noted.get()
    if noted is None:
        return None
    _noted.set(None)
    expand = getattr(module, _EXPAND, None)
    if noted[0] != layer_id or expand is None:
        raise UnsupportedModelError(
            f"layer {layer_id} ({type(module).__name__}) caches a latent, but does not say how keys and values are"
            f" made of it: this needs a release of transformers whose attention has {_EXPAND}"
        )
    return LatentRows(noted[1], noted[2], expand)


def check_latent(place: str, layer: LayerGeometry, call: AttentionCall) -> None:
    """Check, while a layer runs, that it caches the latent that it should and reads what it makes of that.

    The place begins the message of an `UnsupportedModelError`, such as ``DeepseekV3ForCausalLM: layer 0``.
    """
    latent = call.latent
    expected = (layer.num_kv_heads, layer.head_dim, layer.rope_dim)
    actual = None if latent is None else (latent.rows.shape[1], latent.rows.shape[3], latent.rope.shape[3])
    if latent is None or actual != expected:
        given = "nothing" if actual is None else f"(heads, channels, rotary channels) = {actual}"
        raise UnsupportedModelError(
            f"{place} caches a latent by its configuration, {expected}, but gave its cache {given}: such models need a"
            " release of transformers that caches latents"
        )
    for made, read in zip(latent.expanded(latent.rows), (call.k, call.v), strict=True):
        tolerance = 1e-4 if read.dtype == torch.float32 else 2e-2
        if made.shape != read.shape or (made - read).abs().max() > tolerance * read.abs().max().clamp_min(1e-6):
            raise UnsupportedModelError(f"{place} reads other keys and values than those that it makes of its latent")
