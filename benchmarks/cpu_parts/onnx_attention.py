"""ONNX Runtime's GroupQueryAttention on a processor, over float32 and over 8 and 4 bits as its wheel has them.

    pip install onnxruntime onnx

A cache has one scale for each channel of a head, which never changes: coarser than ours, which have one for each token.
"""

from __future__ import annotations

import importlib.util
import itertools
from typing import TYPE_CHECKING, Any, Final

import torch

from cpu_parts.step import GQA, HEAD_DIM, NUM_KV_HEADS, Stepper, check_output, num_copies, random_states

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from cpu_parts.step import Requests

WIDTHS: Final = (32, 8, 4)
PACKAGES: Final = ("onnxruntime", "onnx")
LARGEST_STATE: Final = 4.5
"""The largest key or value that a code stands for, standard deviations of what fills the cache."""
TOLERANCE: Final = 1e-4
"""The error allowed: sums in float32."""


def missing_packages() -> list[str]:
    """The packages that are not installed here."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def onnx_steppers(case: Requests) -> tuple[dict[str, Stepper], list[str]]:
    """The steps of every width by name, and a line for each that this release does not run."""
    import onnxruntime

    found, refused = {}, []
    for bits in WIDTHS:
        name = "ONNX Runtime " + ("float32" if bits == 32 else f"int{bits}")
        try:
            found[name] = _stepper(case, bits, name)
        except Exception as error:  # its errors have no common class of their own; they are printed and named
            if not type(error).__module__.startswith("onnxruntime"):
                raise
            line = str(error).strip().splitlines()[0]
            refused.append(f"{name} is left out: onnxruntime {onnxruntime.__version__} refuses it: {line}")
    return found, refused


def _stepper(case: Requests, bits: int, name: str) -> Stepper:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = case.threads
    options.log_severity_level = 3
    # Threads that wait in a loop would count as work of what is timed next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(_model(bits), options, providers=["CPUExecutionProvider"])
    scale = LARGEST_STATE / (2 ** (bits - 1) - 1)
    sides = [_coded(random_states(case).transpose(1, 2), bits, scale) for _ in range(2)]
    (k_codes, k), (v_codes, v) = sides
    q = torch.randn(case.batch, 1, NUM_KV_HEADS * GQA * HEAD_DIM)
    inputs = {
        "query": q,
        # The newest token, which the step writes in its place again.
        "key": k[:, :, -1:].transpose(1, 2).flatten(2),
        "value": v[:, :, -1:].transpose(1, 2).flatten(2),
        "last": torch.full((case.batch,), case.tokens - 1, dtype=torch.int32),
        "total": torch.tensor([case.tokens], dtype=torch.int32),
    }
    if bits < 32:
        inputs |= {name: torch.full((NUM_KV_HEADS * HEAD_DIM,), scale) for name in ("k_scale", "v_scale")}
    num_bytes = k_codes.nbytes + v_codes.nbytes
    bindings = [_binding(session, inputs, k_codes, v_codes) for _ in range(num_copies(num_bytes))]
    session.run_with_iobinding(bindings[0])
    output = torch.from_numpy(bindings[0].get_outputs()[-1].numpy()).view(case.batch, -1, HEAD_DIM)
    check_output(name, output, q.view(output.shape), k.transpose(1, 2), v.transpose(1, 2), TOLERANCE)
    turns = itertools.cycle(bindings)
    return Stepper(num_bytes, lambda: session.run_with_iobinding(next(turns)))


def _coded(states: Tensor, bits: int, scale: float) -> tuple[Tensor, Tensor]:
    """The codes [batch, num_kv_heads, tokens, channels or pairs of them] of states, and what they stand for."""
    if bits == 32:
        return states.contiguous(), states
    half = 2 ** (bits - 1)
    codes = (states / scale).round().clamp(-half, half - 1)
    stored = codes.to(torch.int8)
    if bits == 4:  # two channels in a byte, the first one low, with 8 added
        pairs = (codes + half).to(torch.uint8)
        stored = pairs[..., 0::2] | pairs[..., 1::2] << 4
    return stored.contiguous(), codes * scale


def _binding(session: Any, inputs: dict[str, Tensor], k: Tensor, v: Tensor) -> Any:
    """What a step reads and writes: the cache in place, another copy for each binding."""
    import onnxruntime

    of_tensor: Callable[[Any], Any] = onnxruntime.OrtValue.ortvalue_from_numpy
    binding = session.io_binding()
    for name, tensor in inputs.items():
        binding.bind_ortvalue_input(name, of_tensor(tensor.contiguous().numpy()))
    for name, tensor in (("keys", k), ("values", v)):
        cache = of_tensor(tensor.numpy().copy())
        binding.bind_ortvalue_input(name, cache)
        binding.bind_ortvalue_output(f"new_{name}", cache)
    binding.bind_output("output")
    return binding


def _model(bits: int) -> bytes:
    from onnx import TensorProto, helper

    number, integer = TensorProto.FLOAT, TensorProto.INT32
    cached = {32: number, 8: TensorProto.INT8, 4: TensorProto.UINT8}[bits]
    channels = HEAD_DIM // 2 if bits == 4 else HEAD_DIM
    states, cache = ["batch", 1, NUM_KV_HEADS * HEAD_DIM], ["batch", NUM_KV_HEADS, "tokens", channels]
    shapes = {
        "query": (number, ["batch", 1, NUM_KV_HEADS * GQA * HEAD_DIM]),
        "key": (number, states),
        "value": (number, states),
        "keys": (cached, cache),
        "values": (cached, cache),
        "last": (integer, ["batch"]),
        "total": (integer, [1]),
    }
    attributes: dict[str, Any] = {"num_heads": NUM_KV_HEADS * GQA, "kv_num_heads": NUM_KV_HEADS}
    names = list(shapes)
    if bits < 32:
        attributes |= {"kv_cache_bit_width": bits, "k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
        scales = {name: (number, [NUM_KV_HEADS * HEAD_DIM]) for name in ("k_scale", "v_scale")}
        shapes |= scales
        names += [*[""] * 5, *scales]  # between them: rotary embeddings, positions, biases and sinks
    outputs = {"output": shapes["query"], "new_keys": (cached, cache), "new_values": (cached, cache)}
    node = helper.make_node("GroupQueryAttention", names, list(outputs), domain="com.microsoft", **attributes)
    inputs, results = (
        [helper.make_tensor_value_info(name, *kind) for name, kind in group.items()] for group in (shapes, outputs)
    )
    graph = helper.make_graph([node], "attention", inputs, results)
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=versions, ir_version=10).SerializeToString())
