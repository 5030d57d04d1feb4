"""Runs a model as if its cache were stored by a recipe. Knows no recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtuner.calibration.forward.parallel_sequences import num_workers, run_in_parallel
from kvtuner.calibration.forward.read_plan import (
    ROWS_AT_A_TIME,
    AttentionCall,
    attend,
    attention_scores,
    causal_softmax,
)
from kvtuner.calibration.kl import TokenScores, compare, following

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.calibration.forward.attention_hook import AttentionHook
    from kvtuner.calibration.forward.simulator import PreparedBatch, Simulator

    from .recipe import StoredLayer


def measure(simulator: Simulator, layers: Sequence[StoredLayer]) -> TokenScores:
    """Scores of all sequences, [num_sequences, scored tokens], where tokens from the split on read the recipe's cache.

    The read plan is `decode`: a prompt is prefilled exactly, and each later query reads what is quantized by its time.
    """
    assert simulator.plan.name == "decode", "other plans read caches of other ages"
    hook = recipe_attention(layers, simulator.plan.split)

    def score(item: PreparedBatch) -> TokenScores:
        final = simulator.chain.run(item.embedded, item.calls, item.prompt.before(hook))
        late = final[:, simulator.plan.split - item.prompt.num_tokens :]
        return compare(simulator.chain, item.reference, late, following(item.batch.input_ids, simulator.plan.split))

    parts = list(run_in_parallel(score, simulator.prepare(), num_workers(simulator.chain.model)))
    return TokenScores.joined(parts)


def recipe_attention(layers: Sequence[StoredLayer], split: int) -> AttentionHook:
    """A hook in which queries from `split` on read keys and values as `layers` store them."""

    def hook(layer_id: int, call: AttentionCall) -> Tensor:
        late = _attend_late(call, layers[layer_id], max(call.first, split))
        if call.first >= split:
            return late
        early = slice(None, split)
        prompt = AttentionCall(
            call.q[:, :, early], call.k[:, :, early], call.v[:, :, early], call.scaling, call.softcap
        )
        return torch.cat((attend(prompt), late), dim=2)

    return hook


def _attend_late(call: AttentionCall, layer: StoredLayer, start: int) -> Tensor:
    """Attention of the tokens from `start` on, in the queries' dtype."""
    keys, values = layer
    k, v = keys.quantizer.read_back(call.k), values.quantizer.read_back(call.v)
    if keys.exact.is_empty and values.exact.is_empty:
        return attend(call, k, v, start=start)
    exact_k, exact_v = call.k.to(torch.float32), call.v.to(torch.float32)
    places, blocks = torch.arange(k.shape[2], device=k.device), []
    for first in range(start, len(places), ROWS_AT_A_TIME):
        rows = places[first : first + ROWS_AT_A_TIME]
        seen = slice(None, first + len(rows))
        q = call.grouped_query(slice(first - call.first, first - call.first + len(rows)))
        scores = torch.where(
            keys.exact.mask(rows, places[seen]),
            attention_scores(call, q, exact_k[:, :, seen]),
            attention_scores(call, q, k[:, :, seen]),
        )
        weights = causal_softmax(call, scores, rows)
        of_exact = weights * values.exact.mask(rows, places[seen])
        attended = of_exact @ exact_v[:, :, None, seen] + (weights - of_exact) @ v[:, :, None, seen]
        blocks.append(attended.flatten(1, 2).to(call.q.dtype))
    return torch.cat(blocks, dim=2)
