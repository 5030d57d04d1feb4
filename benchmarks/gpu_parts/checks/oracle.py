"""What the outputs of kernels are compared with: attention in float64, and bits that must be equal."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from kvtuner.precision import used_word_bits, words_offset

if TYPE_CHECKING:
    from torch import Tensor

    from gpu_parts.machine import Machine
    from gpu_parts.pools import Layer
    from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
    from kvtuner.runtime_loader.packed_attention import PackedRows, ScoreScaling


def starts_of(counts: tuple[int, ...], machine: Machine) -> Tensor:
    """The bounds of requests in a row, as SGLang has them."""
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=machine.device)


def share_that_differs(actual: Tensor, expected: Tensor) -> float:
    """The share of tokens that are not equal to the bit; NaN equals NaN."""
    actual, expected = actual.cpu(), expected.cpu()
    return (~torch.isclose(actual, expected, rtol=0, atol=0, equal_nan=True)).any(1).double().mean().item()


def miswritten(side: PackedRows, slots: Tensor, x: Tensor) -> float:
    """The share of tokens whose rows at slots are not those of keys or values [tokens, num_heads, head_dim]."""
    row = side.format
    written, expected = side.rows[slots].flatten(1), row.pack(x.cpu()).flatten(1)
    if row.spec is not None:  # the padding behind codes and scales is nobody's
        num_words = row.num_heads * row.head_dim // (row.spec.group_size or row.head_dim)
        word_bits = used_word_bits(row.bits, row.spec.word_bits)
        used = words_offset(row.num_heads, row.head_dim, row.bits, word_bits) + word_bits // 8 * num_words
        written, expected = written[:, :used], expected[:, :used]
    return share_that_differs(written, expected)


def exact(
    q: Tensor, keys: PackedRows, values: PackedRows, slots: Tensor, lengths: tuple[int, ...], scores: ScoreScaling,
    fresh: tuple[tuple[int, ...], Tensor, Tensor] | None = None, read_as: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Causal attention in float64 over the rows as they are read back, rounded to `read_as`, and over new tokens."""
    k, v = (side.read(slots, torch.float32).to(read_as).double() for side in (keys, values))
    return exact_of_states(q, k, v, lengths, scores, fresh)


def exact_of_states(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scores: ScoreScaling,
    fresh: tuple[tuple[int, ...], Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention in float64 over keys and values of requests, and over new tokens."""
    counts = (1,) * len(lengths) if fresh is None else fresh[0]
    outputs, first, begin = [], 0, 0
    for length, count in zip(lengths, counts, strict=True):
        k_of, v_of = k[first : first + length], v[first : first + length]
        if fresh is not None:
            k_of = torch.cat((k_of, fresh[1][begin : begin + count].double()))
            v_of = torch.cat((v_of, fresh[2][begin : begin + count].double()))
        gqa = q.shape[1] // k.shape[1]
        products = torch.einsum("qhd,khd->hqk", q[begin : begin + count].double(), k_of.repeat_interleave(gqa, 1))
        hidden = torch.ones(products.shape[1:], dtype=torch.bool, device=q.device).triu(1 + len(k_of) - count)
        weights = scores(products).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)  # of no token: zeros
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v_of.repeat_interleave(gqa, 1)))
        first, begin = first + length, begin + count
    return torch.cat(outputs)


def replayed(
    machine: Machine, attention: TritonAttention, q: Tensor, layer: Layer, indptr: Tensor, slots: Tensor,
    scores: ScoreScaling,
) -> Tensor:  # fmt: skip
    """The output of a graph that was captured with requests of one token and is replayed with the real ones."""
    attention.prepare([layer], q.shape[1], len(q))
    if machine.smoke:
        return attention.decode(q, *layer, indptr, slots, scores)
    q_in, slots_in = torch.zeros_like(q), slots.clone()
    indptr_in = torch.arange(len(indptr), dtype=torch.int32, device=machine.device)
    attention.decode(q_in, *layer, indptr_in, slots_in, scores)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.decode(q_in, *layer, indptr_in, slots_in, scores)
    q_in.copy_(q)
    indptr_in.copy_(indptr)
    slots_in.copy_(slots)
    graph.replay()
    torch.cuda.synchronize()
    return out


def error_of(actual: Tensor, expected: Tensor) -> float:
    """The largest error of a query's head as a share of its norm; where there is NaN it is NaN, within no limit."""
    difference, size = (actual.double() - expected).norm(dim=-1), expected.norm(dim=-1)
    return torch.where(size > 0, difference / size.clamp(min=1e-30), difference).max().item()
