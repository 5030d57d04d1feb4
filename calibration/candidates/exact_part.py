"""Attention of some rows in which an exact window covers some (row, key) pairs. Knows nothing of candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvtuner.calibration.forward.read_plan import (
    AttentionCall,
    attention_scores,
    causal_softmax,
    probabilities,
    reads_exactly,
)

if TYPE_CHECKING:
    from kvtuner.precision import ExactWindow


def read_values(probabilities: Tensor, v: Tensor) -> Tensor:
    """Attention outputs [..., num_kv_heads, group, rows, channels] of values [batch, num_kv_heads, tokens, channels].

    The queries of a group are rows of one matrix: matmul would copy the values for each of them.
    """
    output: Tensor = (probabilities.flatten(-3, -2) @ v).unflatten(-2, probabilities.shape[-3:-1])
    return output


class ExactPart(NamedTuple):
    """The (row, key) pairs of a block that an exact window covers, with their exact scores and the exact values.

    Attributes:
        near: Whether a row reads a key from its copy, [rows, tokens].
        scores: The scores by exact keys, [batch, num_kv_heads, group, rows, tokens].
        v: The exact values, [batch, num_kv_heads, tokens, v_head_dim].
    """

    near: Tensor
    scores: Tensor
    v: Tensor


def exact_part_of(
    window: ExactWindow, call: AttentionCall, q: Tensor, tokens: Tensor, k: Tensor, v: Tensor
) -> ExactPart | None:
    """The exact part of a block of `tokens` with queries q, keys k and values v; None without a window."""
    if not window.num_tokens:
        return None
    near = reads_exactly(window, tokens, torch.arange(k.shape[-2], device=tokens.device))
    return ExactPart(near, attention_scores(call, q, k), v)


def probabilities_beside(call: AttentionCall, q: Tensor, k: Tensor, tokens: Tensor, exact: ExactPart | None) -> Tensor:
    """The `probabilities` of keys that are read back, but for those of the exact part."""
    if exact is None:
        return probabilities(call, q, k, tokens)
    return causal_softmax(call, torch.where(exact.near, exact.scores, attention_scores(call, q, k)), tokens)


def outputs_beside(probabilities: Tensor, v: Tensor, exact: ExactPart | None) -> Tensor:
    """What `read_values` gives of values that are read back, but for those of the exact part.

    There may be several side by side in the channels.
    """
    if exact is None:
        return read_values(probabilities, v)
    near = probabilities * exact.near
    repeats = v.shape[-1] // exact.v.shape[-1]
    return read_values(probabilities - near, v) + read_values(near, exact.v).tile((repeats,))
