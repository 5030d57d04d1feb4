"""What recipes that are calibrated need of a layer: covariances and largest magnitudes. Knows nothing of bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtuner.calibration.forward.read_plan import AttentionCall, attend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.forward.chain import DecoderChain


@dataclass(frozen=True, slots=True, eq=False)
class LayerMoments:
    """The moments of a layer's queries, keys and values.

    Attributes:
        query_covariance: The mean of q q^T, over heads too, float64 [head_dim, head_dim].
        value_covariance: The mean of v v^T, each token of a head weighted by its key's k^T C k with that head's query
            covariance C, float64 [v_head_dim, v_head_dim].
        k_max: The largest magnitude of a key's element.
        v_max: The largest magnitude of a value's element.
    """

    query_covariance: Tensor
    value_covariance: Tensor
    k_max: float
    v_max: float


def measure_moments(chain: DecoderChain, batches: Sequence[Batch]) -> tuple[LayerMoments, ...]:
    """Run the exact model twice over `batches`: values are weighted by the covariance of all queries."""
    layers, heads = chain.geometry.num_layers, chain.geometry.num_kv_heads
    covariances = [torch.zeros(()) for _ in range(layers)]
    largest = [[0.0, 0.0] for _ in range(layers)]

    def gather(layer_id: int, call: AttentionCall) -> Tensor:
        q = call.grouped_query().double().transpose(0, 1).flatten(1, 3)  # [num_kv_heads, queries, head_dim]
        covariances[layer_id] = covariances[layer_id] + q.mT @ q
        for side, x in enumerate((call.k, call.v)):
            largest[layer_id][side] = max(largest[layer_id][side], float(x.abs().max()))
        return attend(call)

    _run(chain, batches, gather)
    tokens = sum(batch.num_tokens for batch in batches) * chain.geometry.num_attention_heads // heads
    covariances = [total / tokens for total in covariances]
    sums = [[torch.zeros(()), torch.zeros(())] for _ in range(layers)]

    def weigh(layer_id: int, call: AttentionCall) -> Tensor:
        k, v = (x.double().transpose(0, 1).flatten(1, 2) for x in (call.k, call.v))  # [num_kv_heads, tokens, channels]
        energy = ((k @ covariances[layer_id]) * k).sum(-1, keepdim=True)
        sums[layer_id][0] = sums[layer_id][0] + v.mT @ (energy * v)
        sums[layer_id][1] = sums[layer_id][1] + energy.sum(1, keepdim=True)
        return attend(call)

    _run(chain, batches, weigh)
    return tuple(
        LayerMoments(covariance.mean(0), (weighted / energy.clamp_min(1e-12)).mean(0), *maxima)
        for covariance, (weighted, energy), maxima in zip(covariances, sums, largest, strict=True)
    )


def _run(chain: DecoderChain, batches: Sequence[Batch], hook: object) -> None:
    for batch in batches:
        chain.trace(batch.input_ids, batch.position_ids, hook)  # type: ignore[arg-type] # one of two hooks above
