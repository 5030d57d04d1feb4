"""Times whole decoding steps of a model with random weights, in CUDA graphs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import rms_norm, silu

from gpu_parts import baselines
from gpu_parts.pools import ALL_TRANSFORMS, LLAMA, TINY, HeadShape, batch_of, filled, row_format
from gpu_parts.speed import timed
from kvtuner.precision import PrecisionPair
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import ScoreScaling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from gpu_parts.machine import Machine
    from gpu_parts.speed import Row
    from kvtuner.runtime_loader.packed_attention import PackedRows

SPARE_BYTES: Final = 3 << 30
EQUAL: Final = (32, 16384)
FULL_LENGTH: Final = 8192
MOST_REQUESTS: Final = 1024


class RandomModel:
    """A dense model with random weights: only their sizes matter."""

    def __init__(
        self, machine: Machine, shape: HeadShape, num_layers: int, hidden: int, intermediate: int, vocabulary: int
    ) -> None:
        self.shape, self.num_layers, self.vocabulary = shape, num_layers, vocabulary
        width = shape.num_heads * shape.head_dim
        joint = width + 2 * shape.num_kv_heads * shape.head_dim

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=machine.dtype, device=machine.device).normal_(std=columns**-0.5)

        self.layers = [
            (matrix(joint, hidden), matrix(hidden, width), matrix(2 * intermediate, hidden),
             matrix(hidden, intermediate))
            for _ in range(num_layers)
        ]  # fmt: skip
        self.embedding, self.head = matrix(vocabulary, hidden), matrix(vocabulary, hidden)
        self.norm = torch.ones(hidden, dtype=machine.dtype, device=machine.device)


LLAMA_8B: Final = (LLAMA, 32, 4096, 14336, 128256)
TINY_MODEL: Final = (TINY, 2, 64, 96, 50)


@dataclass(frozen=True, slots=True)
class StoredLayers:
    """The storage of a model's layers: pairs in turn, and the transform of keys."""

    name: str
    pairs: str
    transform: str = "none"

    def pair(self, layer: int) -> PrecisionPair:
        """The pair of a layer."""
        names = self.pairs.split()
        return PrecisionPair.parse(names[layer % len(names)])

    def bytes_per_token(self, machine: Machine, model: RandomModel) -> int:
        """The bytes of one token in all layers."""
        pairs = map(self.pair, range(model.num_layers))
        widths = [bits for pair in pairs for bits in (pair.k_bits, pair.v_bits)]
        return sum(row_format(model.shape, bits).row_bytes(machine.dtype) for bits in widths)


KINDS: Final = (
    StoredLayers("bf16", "K16V16"),
    StoredLayers("K8V8", "K8V8"),
    StoredLayers("K4V4", "K4V4"),
    StoredLayers("K4V4, all transforms", "K4V4", ALL_TRANSFORMS),
    StoredLayers("K4V2", "K4V2"),
    StoredLayers("mixed", "K8V8 K8V4 K4V4 K4V4 K4V2 K4V2 K4V4 K8V4", "hadamard"),
)


def with_positions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys with rotary positions; channel i turns with i + head_dim / 2."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def step_of(
    machine: Machine, model: RandomModel, kind: StoredLayers, num_requests: int, length: int, kernel: str
) -> Callable[[], object]:
    """A function that decodes one token for every request, each with `length` tokens in the pool.

    Kernels other than ours read 16-bit rows, torch's as if requests lay one after the other.
    """
    shape = model.shape
    num_slots, attention = num_requests * length, TritonAttention(machine.device)
    layers = [
        filled(machine, attention, shape, kind.pair(layer), num_slots, kind.transform)
        for layer in range(model.num_layers)
    ]
    attention.prepare(layers, shape.num_heads, num_requests)
    batch = batch_of(machine, num_requests, length, num_slots, 1)
    slots, last = batch.slots[0], batch.slots[0][batch.indptr[1:].long() - 1]
    tokens = torch.randint(model.vocabulary, (num_requests,), device=machine.device)
    angle = float(length) / 5e5 ** torch.linspace(0, 1, shape.head_dim // 2, device=machine.device)
    cos, sin = angle.cos().to(machine.dtype), angle.sin().to(machine.dtype)
    heads, scores = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), ScoreScaling(shape.head_dim**-0.5)

    def by_kernel(q: Tensor, keys: PackedRows, values: PackedRows) -> Tensor:
        return attention.decode(q, keys, values, batch.indptr, slots, scores)

    def by_torch(q: Tensor, keys: PackedRows, values: PackedRows) -> Tensor:
        k, v = (side.rows.view(num_requests, length, *side.shape[1:]).transpose(1, 2) for side in (keys, values))
        return baselines.attended_by_torch(kernel, q.unflatten(1, (shape.num_kv_heads, shape.gqa)), k, v).flatten(1, 2)

    attend: Callable[[Tensor, PackedRows, PackedRows], Tensor] = by_torch if kernel.startswith("torch") else by_kernel
    if kernel.startswith("sglang"):
        splits = baselines.SGLANG_SPLITS[0]
        native = baselines.by_sglang(baselines.sglang_kernels()[0], machine, shape, *layers[0], num_requests, splits)

        def attend(q: Tensor, keys: PackedRows, values: PackedRows) -> Tensor:
            return native(q, batch.indptr, slots, keys, values)

    def step() -> Tensor:
        x = model.embedding[tokens]
        for (keys, values), (joint, output, up, down) in zip(layers, model.layers, strict=True):
            states = (rms_norm(x, x.shape[-1:], model.norm) @ joint.T).view(num_requests, -1, shape.head_dim)
            q, k, v = states.split(heads, 1)
            q, k = with_positions(q, cos, sin), with_positions(k, cos, sin)
            attention.store(keys, values, last, k, v)
            x = x + attend(q, keys, values).flatten(1) @ output.T
            gate, value = (rms_norm(x, x.shape[-1:], model.norm) @ up.T).chunk(2, -1)
            x = x + (silu(gate) * value) @ down.T
        return (rms_norm(x, x.shape[-1:], model.norm) @ model.head.T).argmax(-1)

    return step


def run(machine: Machine) -> Iterator[Row]:
    """Rows of steps at the batch that bf16 holds and with a full pool, for every storage, and every kernel in bf16."""
    model = RandomModel(machine, *(TINY_MODEL if machine.smoke else LLAMA_8B))
    room = machine.free_bytes - SPARE_BYTES
    in_bf16 = ["ours", *baselines.of_torch(machine)]
    in_bf16 += ["sglang triton"] if baselines.sglang_kernels()[0] is not None else []
    bf16_tokens = room // KINDS[0].bytes_per_token(machine, model)
    equal = (2, 12) if machine.smoke else (min(EQUAL[0], bf16_tokens // EQUAL[1]), EQUAL[1])
    for kind in KINDS:
        per_token = kind.bytes_per_token(machine, model)
        full = (2, 16) if machine.smoke else (min(MOST_REQUESTS, room // per_token // FULL_LENGTH), FULL_LENGTH)
        for what, (num_requests, length) in (("equal batch", equal), ("full pool", full)):
            if not num_requests:
                continue  # a device that does not hold one request beside the weights
            for kernel in in_bf16 if kind is KINDS[0] else ["ours"]:
                row = {"what": what, "kind": kind.name, "kernel": kernel, "batch": num_requests, "length": length}
                row["bytes_per_token"] = per_token
                step = functools.partial(step_of, machine, model, kind, num_requests, length, kernel)
                times = timed(machine, row, lambda make: [make()], step)
                speed = num_requests / times["seconds"] if times["seconds"] else None
                yield {**times, "tokens_per_s": speed}
