"""Attends over packed rows where kvtuner came from a wheel, and prints by which instruction set and library."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import kvtuner
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.attention_backends import backend_for
from kvtuner.runtime_loader.cpu.library import compiler
from kvtuner.runtime_loader.cpu.native_attention import NativeAttention
from kvtuner.runtime_loader.packed_attention import PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.runtime_loader.torch_attention import TorchAttention

assert Path(sys.prefix) in Path(kvtuner.__file__).parents, kvtuner.__file__
assert compiler() is None
attention = backend_for(torch.device("cpu")).make(torch.device("cpu"))
if isinstance(attention, NativeAttention):
    row_format = RowFormat(2, 64, QuantSpec(4))
    states = torch.randn(100, 2, 64, generator=torch.Generator().manual_seed(0))
    stored = PackedRows(row_format.pack(states), row_format)
    case = (states[:1].repeat(1, 2, 1), stored, stored, torch.tensor([0, 100]), torch.arange(100), ScoreScaling(0.125))
    found, expected = (each.decode(*case) for each in (attention, TorchAttention()))
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5 * float(expected.abs().max()))
    sys.stdout.write(f"{attention.instruction_set} {attention._library._name}\n")
else:
    sys.stdout.write(f"{attention.name}\n")
