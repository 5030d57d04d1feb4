"""Decoding steps of a model with random weights in CUDA graphs: what attention over packed rows does to all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import rms_norm, silu

from gpu_parts import baselines
from gpu_parts.pools import LLAMA, TINY, Shape, batch_of, filled, row_format
from kvtuner.precision import PrecisionPair
from kvtuner.runtime_loader.kernels.attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import Scores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from gpu_parts.machine import Machine
    from kvtuner.runtime_loader.packed_attention import StoredRows

SPARE_BYTES: Final = 3 << 30
EQUAL: Final = (32, 16384)
FULL_LENGTH: Final = 8192
MOST_REQUESTS: Final = 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a dense model."""

    shape: Shape
    num_layers: int
    hidden: int
    intermediate: int
    vocabulary: int


LLAMA_8B: Final = Sizes(LLAMA, 32, 4096, 14336, 128256)
TINY_MODEL: Final = Sizes(TINY, 2, 64, 96, 50)

MIXED: Final = [PrecisionPair.parse(pair) for pair in ("K8V8", "K8V4", "K4V4", "K4V4", "K4V2", "K4V2", "K4V4", "K8V4")]
"""Layers in turn: what a search gives looks like this."""


class Weights:
    """Random ones; their size is what matters."""

    def __init__(self, machine: Machine, sizes: Sizes) -> None:
        shape, width = sizes.shape, sizes.shape.num_heads * sizes.shape.head_dim
        joint = width + 2 * shape.num_kv_heads * shape.head_dim

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=machine.dtype, device=machine.device).normal_(std=columns**-0.5)

        self.layers = [
            (matrix(joint, sizes.hidden), matrix(sizes.hidden, width), matrix(2 * sizes.intermediate, sizes.hidden),
             matrix(sizes.hidden, sizes.intermediate))
            for _ in range(sizes.num_layers)
        ]  # fmt: skip
        self.embedding = matrix(sizes.vocabulary, sizes.hidden)
        self.head = matrix(sizes.vocabulary, sizes.hidden)
        self.norm = torch.ones(sizes.hidden, dtype=machine.dtype, device=machine.device)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves of channels as pairs."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def step_of(
    machine: Machine,
    sizes: Sizes,
    weights: Weights,
    pairs: list[PrecisionPair],
    num_requests: int,
    length: int,
    native: Any = None,
) -> Callable[[], object]:
    """One token for every request, each with `length` tokens in the pool.

    Args:
        machine: at hand.
        sizes: of the model.
        weights: of the model.
        pairs: of layers, in turn.
        num_requests: of the batch.
        length: tokens of each.
        native: SGLang's kernel in the place of ours, over 16-bit rows.
    """
    shape = sizes.shape
    num_slots, attention = num_requests * length, TritonAttention(machine.device)
    layers = [
        filled(machine, attention, shape, pairs[layer % len(pairs)], num_slots, "none")
        for layer in range(sizes.num_layers)
    ]
    attention.prepare(layers, shape.num_heads, num_requests)
    batch = batch_of(machine, num_requests, length, num_slots, 1)
    slots, last = batch.slots[0], batch.slots[0][batch.indptr[1:].long() - 1]
    tokens = torch.randint(sizes.vocabulary, (num_requests,), device=machine.device)
    angle = float(length) / 5e5 ** torch.linspace(0, 1, shape.head_dim // 2, device=machine.device)
    cos, sin = angle.cos().to(machine.dtype), angle.sin().to(machine.dtype)
    heads, scores = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), Scores(shape.head_dim**-0.5)

    def attend(q: Tensor, keys: StoredRows, values: StoredRows) -> Tensor:
        return attention.decode(q, keys, values, batch.indptr, slots, scores)

    out = torch.empty(num_requests, shape.num_heads, shape.head_dim, dtype=machine.dtype, device=machine.device)
    size = (num_requests, shape.num_heads, baselines.SGLANG_SPLITS[0])
    logits, lse = (torch.empty(*size, *more, device=machine.device) for more in ((shape.head_dim,), ()))
    num_splits = torch.full((num_requests,), size[-1], dtype=torch.int32, device=machine.device)

    def attend_natively(q: Tensor, keys: StoredRows, values: StoredRows) -> Tensor:
        native(
            q, keys.rows, values.rows, out, batch.indptr, slots, logits, lse, num_splits, size[-1],
            shape.head_dim**-0.5, 1.0, 1.0,
        )  # fmt: skip
        return out

    read = attend if native is None else attend_natively

    def step() -> Tensor:
        x = weights.embedding[tokens]
        for (keys, values), (joint, output, up, down) in zip(layers, weights.layers, strict=True):
            states = (rms_norm(x, x.shape[-1:], weights.norm) @ joint.T).view(num_requests, -1, shape.head_dim)
            q, k, v = states.split(heads, 1)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
            attention.store(keys, values, last, k, v)
            x = x + read(q, keys, values).flatten(1) @ output.T
            gate, value = (rms_norm(x, x.shape[-1:], weights.norm) @ up.T).chunk(2, -1)
            x = x + (silu(gate) * value) @ down.T
        return (rms_norm(x, x.shape[-1:], weights.norm) @ weights.head.T).argmax(-1)

    return step


def run(machine: Machine) -> Iterator[dict[str, Any]]:
    """Steps at the batch that bf16 holds, and with the pool full; each with every pair."""
    sizes = TINY_MODEL if machine.smoke else LLAMA_8B
    weights = Weights(machine, sizes)
    room = machine.free_bytes - SPARE_BYTES
    kinds: dict[str, list[PrecisionPair]] = {
        pair: [PrecisionPair.parse(pair)] for pair in ("K16V16", "K8V8", "K4V4", "K4V2")
    }
    kinds["mixed"] = MIXED
    kernel, _ = baselines.sglang_kernels()
    bf16_tokens = room // bytes_per_token(machine, sizes, kinds["K16V16"])
    equal = (2, 12) if machine.smoke else (min(EQUAL[0], bf16_tokens // EQUAL[1]), EQUAL[1])
    for name, pairs in kinds.items():
        per_token = bytes_per_token(machine, sizes, pairs)
        full = (2, 16) if machine.smoke else (min(MOST_REQUESTS, room // per_token // FULL_LENGTH), FULL_LENGTH)
        for what, (num_requests, length) in (("equal batch", equal), ("full pool", full)):
            natives = [("ours", None)]
            if name == "K16V16" and kernel is not None:
                natives.append(("sglang triton", kernel))
            for which, native in natives:
                step = step_of(machine, sizes, weights, pairs, num_requests, length, native)
                seconds = machine.seconds([step])
                row = {"what": what, "pair": name, "kernel": which, "batch": num_requests, "length": length}
                speed = {"seconds": seconds, "tokens_per_s": num_requests / seconds}
                yield {**row, "bytes_per_token": per_token, **speed}
                del step


def bytes_per_token(machine: Machine, sizes: Sizes, pairs: list[PrecisionPair]) -> int:
    """Of all layers."""
    return sum(
        row_format(sizes.shape, bits).row_bytes(machine.dtype)
        for layer in range(sizes.num_layers)
        for bits in (pairs[layer % len(pairs)].k_bits, pairs[layer % len(pairs)].v_bits)
    )
