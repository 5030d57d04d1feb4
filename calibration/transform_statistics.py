"""The first pass: the mean key and lambda of every layer's key transforms. Knows nothing of bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtuner.calibration.forward.finite_check import check_finite
from kvtuner.calibration.forward.read_plan import AttentionCall, attend
from kvtuner.calibration.sensitivity import LayerConstants
from kvtuner.precision import FP16_MAX
from kvtuner.transforms import MAX_LAMBDA, MIN_LAMBDA

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.forward.chain import DecoderChain
    from kvtuner.calibration.forward.latents import LatentRows
    from kvtuner.geometry import ModelGeometry


@dataclass
class LayerSums:
    """Running sums over tokens, float64 [num_kv_heads, head_dim]."""

    key: Tensor
    key_squared: Tensor
    query_squared: Tensor
    num_tokens: int = 0

    @classmethod
    def zeros(cls, geometry: ModelGeometry) -> LayerSums:
        """The sums of a layer before any token is seen."""
        shape = (geometry.num_kv_heads, geometry.head_dim)
        key, key_squared, query_squared = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
        return cls(key, key_squared, query_squared)

    def add(self, call: AttentionCall) -> None:
        """Count one batch."""
        if call.latent is not None:
            self._add_latents(call.latent, call.q)
            return
        k = call.k.to(torch.float32)
        q = call.grouped_query()
        self.key += k.sum(dim=(0, 2), dtype=torch.float64).cpu()
        self.key_squared += k.square().sum(dim=(0, 2), dtype=torch.float64).cpu()
        self.query_squared += q.square().sum(dim=(0, 2, 3), dtype=torch.float64).cpu() / q.shape[2]
        self.num_tokens += k.shape[0] * k.shape[2]

    def _add_latents(self, latent: LatentRows, queries: Tensor) -> None:
        """Count latents as keys, and as queries those of each head that give the same products with latents."""
        rows, maps = latent.rows.to(torch.float32), latent.query_maps()
        self.key += rows.sum(dim=(0, 2), dtype=torch.float64).cpu()
        self.key_squared += rows.square().sum(dim=(0, 2), dtype=torch.float64).cpu()
        group = queries.shape[1] // len(maps)
        for head, q in enumerate(queries.unbind(1)):  # of all heads at once they would take many times the latents
            products = q.to(torch.float32) @ maps[head // group].mT
            self.query_squared += products.square().sum(dim=(0, 1), dtype=torch.float64).cpu() / queries.shape[1]
        self.num_tokens += rows.shape[0] * rows.shape[2]

    def merge(self, other: LayerSums) -> None:
        """Count the tokens of other sums too."""
        self.key += other.key
        self.key_squared += other.key_squared
        self.query_squared += other.query_squared
        self.num_tokens += other.num_tokens

    def constants(self) -> LayerConstants:
        """The layer's mu and both lambdas."""
        mean = (self.key / self.num_tokens).clamp(-FP16_MAX, FP16_MAX)
        mu = mean.to(torch.float16)
        shift = mu.to(torch.float64)  # rounded to fp16, as it will be subtracted
        power = self.key_squared / self.num_tokens
        centered_power = (power - 2 * shift * (self.key / self.num_tokens) + shift.square()).clamp_min(0)
        query_rms = (self.query_squared / self.num_tokens).sqrt()
        return LayerConstants(mu, balance(power.sqrt(), query_rms), balance(centered_power.sqrt(), query_rms))


def balance(key_rms: Tensor, query_rms: Tensor) -> Tensor:
    """``lambda = sqrt(key_rms / query_rms)``, geometric mean 1 per head, within [1/64, 64]; dead channels 1.

    The root mean squares are those of (centred) keys and of the queries that read them, [num_kv_heads, head_dim]; so is
    the result, in fp16.
    """
    is_live = (key_rms > 0) & (query_rms > 0)
    ratio = torch.where(is_live, key_rms / torch.where(is_live, query_rms, 1.0), 1.0)
    logs = torch.where(is_live, 0.5 * ratio.log(), 0.0)
    mean = logs.sum(dim=-1, keepdim=True) / is_live.sum(dim=-1, keepdim=True).clamp_min(1)
    lam = torch.where(is_live, (logs - mean).exp(), 1.0)
    return lam.clamp(MIN_LAMBDA, MAX_LAMBDA).to(torch.float16)


def measure_constants(chain: DecoderChain, batches: Iterable[Batch]) -> dict[int, LayerConstants]:
    """Run every batch once and return the constants of each tuned layer by its id.

    Raises:
        NonFiniteActivationError: A layer's keys, values or queries hold NaN or infinity.
    """
    return constants_of(chain.geometry, (sums_of_batch(chain, batch) for batch in batches))


def sums_of_batch(chain: DecoderChain, batch: Batch) -> list[LayerSums]:
    """Run one batch and return the sums of each tuned layer in order; raises what `measure_constants` does."""
    sums = {layer_id: LayerSums.zeros(chain.geometry) for layer_id in chain.geometry.ids}

    def hook(layer_id: int, call: AttentionCall) -> Tensor:
        check_finite(layer_id, queries=call.q, keys=call.k, values=call.v)
        if layer_id in sums:
            sums[layer_id].add(call)
        return attend(call)

    chain.trace(batch.input_ids, batch.position_ids, hook, images=batch.images)
    return list(sums.values())


def constants_of(geometry: ModelGeometry, parts: Iterable[Sequence[LayerSums]]) -> dict[int, LayerConstants]:
    """The constants of each tuned layer, by its id, of the sums of all batches, added in their order."""
    totals = [LayerSums.zeros(geometry) for _ in range(geometry.num_layers)]
    for part in parts:
        for total, sums in zip(totals, part, strict=True):
            total.merge(sums)
    return {layer_id: total.constants() for layer_id, total in zip(geometry.ids, totals, strict=True)}
