"""One decoding step of some requests: its shape, what an implementation is to the benchmark, and a check of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NUM_KV_HEADS: Final = 8
GQA: Final = 4
HEAD_DIM: Final = 128
COLD_BYTES: Final = 256 << 20
"""The bytes of all copies of a cache together, several times the last level of a processor's cache."""


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one table. `waiting` is how idle threads of OpenMP wait: passively, or as torch has it."""

    threads: int
    batch: int
    tokens: int
    waiting: str = "default"


@dataclass(frozen=True, slots=True)
class Stepper:
    """A way to attend: what it reads in bytes, and its step, of which every call reads another copy."""

    num_bytes: int
    step: Callable[[], object]


def num_copies(num_bytes: int) -> int:
    """The copies of a cache that do not fit in a processor's cache."""
    return max(2, -(-COLD_BYTES // num_bytes))


def random_states(case: Requests) -> Tensor:
    """Keys or values float32 [batch, tokens, num_kv_heads, head_dim], which repeat after 2,048 tokens."""
    states = torch.randn(2048, NUM_KV_HEADS, HEAD_DIM)
    num_tokens = case.batch * case.tokens
    repeated = states.repeat(num_tokens // len(states) + 1, 1, 1)[:num_tokens]
    return repeated.view(case.batch, case.tokens, NUM_KV_HEADS, HEAD_DIM)


def check_output(name: str, output: Tensor, q: Tensor, k: Tensor, v: Tensor, tolerance: float) -> None:
    """Compare an implementation's output with attention in float32 over what its own cache holds.

    Args:
        name: The implementation's name.
        output: Its output [batch, num_heads, head_dim].
        q: Queries [batch, num_heads, head_dim].
        k: Keys [batch, tokens, num_kv_heads, head_dim].
        v: Values likewise.
        tolerance: The largest error, as a share of the largest output.

    Raises:
        SystemExit: The error is larger, so that its times would mean nothing.
    """
    keys, values = (states.transpose(1, 2) for states in (k, v))
    expected = sdpa(q.unflatten(1, (NUM_KV_HEADS, GQA)), keys, values).flatten(1, 2)
    error = float((output - expected).abs().max() / expected.abs().max())
    if not error <= tolerance:
        raise SystemExit(f"{name} is off by {error:.3g} of the largest output")
