"""Times whole decoding steps of a model with random weights, in CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

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


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a dense model."""

    shape: HeadShape
    num_layers: int
    hidden: int
    intermediate: int
    vocabulary: int


LLAMA_8B: Final = ModelSizes(LLAMA, 32, 4096, 14336, 128256)
TINY_MODEL: Final = ModelSizes(TINY, 2, 64, 96, 50)


@dataclass(frozen=True, slots=True)
class StoredLayers:
    """The storage of a model's layers: pairs in turn, and the transform of keys."""

    name: str
    pairs: tuple[PrecisionPair, ...]
    transform: str = "none"

    def bytes_per_token(self, machine: Machine, sizes: ModelSizes) -> int:
        """The bytes of one token in all layers."""
        pairs = [self.pairs[layer % len(self.pairs)] for layer in range(sizes.num_layers)]
        widths = [bits for pair in pairs for bits in (pair.k_bits, pair.v_bits)]
        return sum(row_format(sizes.shape, bits).row_bytes(machine.dtype) for bits in widths)


def _pairs(*names: str) -> tuple[PrecisionPair, ...]:
    return tuple(PrecisionPair.parse(name) for name in names)


KINDS: Final = (
    StoredLayers("bf16", _pairs("K16V16")),
    StoredLayers("K8V8", _pairs("K8V8")),
    StoredLayers("K4V4", _pairs("K4V4")),
    StoredLayers("K4V4, all transforms", _pairs("K4V4"), ALL_TRANSFORMS),
    StoredLayers("K4V2", _pairs("K4V2")),
    StoredLayers("mixed", _pairs("K8V8", "K8V4", "K4V4", "K4V4", "K4V2", "K4V2", "K4V4", "K8V4"), "hadamard"),
)


class RandomWeights:
    """Random weights of a model; only their size matters."""

    def __init__(self, machine: Machine, sizes: ModelSizes) -> None:
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


def with_positions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys with rotary positions; channel i turns with i + head_dim / 2."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def step_of(
    machine: Machine,
    sizes: ModelSizes,
    weights: RandomWeights,
    kind: StoredLayers,
    num_requests: int,
    length: int,
    kernel: str = "ours",
) -> Callable[[], object]:
    """A function that decodes one token for every request, each with `length` tokens in the pool.

    Args:
        machine: The machine.
        sizes: The sizes of the model.
        weights: The weights of the model.
        kind: The storage of the layers.
        num_requests: The number of requests in the batch.
        length: The tokens of each request.
        kernel: The kernel that attends; all but ours read 16-bit rows, torch as if requests lay one after the other.
    """
    shape = sizes.shape
    num_slots, attention = num_requests * length, TritonAttention(machine.device)
    layers = [
        filled(machine, attention, shape, kind.pairs[layer % len(kind.pairs)], num_slots, kind.transform)
        for layer in range(sizes.num_layers)
    ]
    attention.prepare(layers, shape.num_heads, num_requests)
    batch = batch_of(machine, num_requests, length, num_slots, 1)
    slots, last = batch.slots[0], batch.slots[0][batch.indptr[1:].long() - 1]
    tokens = torch.randint(sizes.vocabulary, (num_requests,), device=machine.device)
    angle = float(length) / 5e5 ** torch.linspace(0, 1, shape.head_dim // 2, device=machine.device)
    cos, sin = angle.cos().to(machine.dtype), angle.sin().to(machine.dtype)
    heads, scores = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), ScoreScaling(shape.head_dim**-0.5)

    def by_kernel(q: Tensor, keys: PackedRows, values: PackedRows) -> Tensor:
        return attention.decode(q, keys, values, batch.indptr, slots, scores)

    def by_torch(q: Tensor, keys: PackedRows, values: PackedRows) -> Tensor:
        k, v = (side.rows.view(num_requests, length, *side.shape[1:]).transpose(1, 2) for side in (keys, values))
        with sdpa_kernel(baselines.SDPA.get(kernel, SDPBackend.MATH)):
            out = scaled_dot_product_attention(q.unflatten(1, (shape.num_kv_heads, shape.gqa)), k, v)
        return out.flatten(1, 2)

    attend: Callable[[Tensor, PackedRows, PackedRows], Tensor] = by_kernel
    if kernel.startswith("torch"):
        attend = by_torch
    elif kernel.startswith("sglang"):
        sglang_kernel, _ = baselines.sglang_kernels()
        native = baselines.by_sglang(
            sglang_kernel, machine, shape, *layers[0], num_requests, baselines.SGLANG_SPLITS[0]
        )

        def attend(q: Tensor, keys: PackedRows, values: PackedRows) -> Tensor:
            return native(q, batch.indptr, slots, keys, values)

    def step() -> Tensor:
        x = weights.embedding[tokens]
        for (keys, values), (joint, output, up, down) in zip(layers, weights.layers, strict=True):
            states = (rms_norm(x, x.shape[-1:], weights.norm) @ joint.T).view(num_requests, -1, shape.head_dim)
            q, k, v = states.split(heads, 1)
            q, k = with_positions(q, cos, sin), with_positions(k, cos, sin)
            attention.store(keys, values, last, k, v)
            x = x + attend(q, keys, values).flatten(1) @ output.T
            gate, value = (rms_norm(x, x.shape[-1:], weights.norm) @ up.T).chunk(2, -1)
            x = x + (silu(gate) * value) @ down.T
        return (rms_norm(x, x.shape[-1:], weights.norm) @ weights.head.T).argmax(-1)

    return step


def run(machine: Machine) -> Iterator[Row]:
    """Rows of steps at the batch that bf16 holds and with a full pool, for every storage, and every kernel in bf16."""
    sizes = TINY_MODEL if machine.smoke else LLAMA_8B
    weights = RandomWeights(machine, sizes)
    room = machine.free_bytes - SPARE_BYTES
    in_bf16 = ["ours", *baselines.of_torch(machine)]
    in_bf16 += ["sglang triton"] if baselines.sglang_kernels()[0] is not None else []
    bf16_tokens = room // KINDS[0].bytes_per_token(machine, sizes)
    equal = (2, 12) if machine.smoke else (min(EQUAL[0], bf16_tokens // EQUAL[1]), EQUAL[1])
    for kind in KINDS:
        per_token = kind.bytes_per_token(machine, sizes)
        full = (2, 16) if machine.smoke else (min(MOST_REQUESTS, room // per_token // FULL_LENGTH), FULL_LENGTH)
        for what, (num_requests, length) in (("equal batch", equal), ("full pool", full)):
            if not num_requests:
                continue  # a device that does not hold one request beside the weights
            for kernel in in_bf16 if kind is KINDS[0] else ["ours"]:
                row = {"what": what, "kind": kind.name, "kernel": kernel, "batch": num_requests, "length": length}
                row["bytes_per_token"] = per_token
                times = timed(
                    machine, row,
                    lambda *args: [step_of(machine, sizes, weights, *args)], kind, num_requests, length, kernel,
                )  # fmt: skip
                speed = num_requests / times["seconds"] if times["seconds"] else None
                yield {**times, "tokens_per_s": speed}
