"""Run by test_compiled.py without the interpreter: compiles for GPUs that are not here, prints JSON."""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import sass

from kvtuner.precision import PrecisionPair
from kvtuner.quant import QuantSpec, Transform, TransformKind
from kvtuner.runtime_loader.kernels import decode
from kvtuner.runtime_loader.kernels.attention import EXACT, DecodeLaunch, decode_facts, store_facts
from kvtuner.runtime_loader.kernels.side import KernelSide
from kvtuner.runtime_loader.kernels.store import store_rows
from kvtuner.runtime_loader.packed_attention import StoredRows
from kvtuner.runtime_loader.row_format import RowFormat

STORE_POINTERS = {
    "k_ptr": "*bf16", "k_rows_ptr": "*i16", "k_mu_ptr": "*fp32", "k_inverse_ptr": "*fp32", "v_ptr": "*bf16",
    "v_rows_ptr": "*i16", "slots_ptr": "*i64",
}  # fmt: skip


def store_instructions(k_bits: int, v_bits: int) -> dict[str, int]:
    """Instructions of the store kernel's PTX for sm_90, with every transform and both kinds of grid."""
    ones = torch.ones(8, 128, dtype=torch.float16)
    full = Transform(TransformKind(True, True, True), ones, ones)
    sides = [
        KernelSide.of(StoredRows(torch.empty(9, 2048, dtype=torch.uint8, device="meta"), RowFormat(8, 128, spec)))
        for spec in (QuantSpec(k_bits, full), QuantSpec(v_bits, symmetric=True))
    ]
    facts = store_facts(*sides, 8)
    names = store_rows.arg_names
    kinds = {name: STORE_POINTERS.get(name, "constexpr" if name in facts else "i32") for name in names}
    constants = {(names.index(name),): value for name, value in facts.items()}
    kernel = triton.compile(ASTSource(store_rows, kinds, constants), target=GPUTarget("cuda", 90, 32), options=EXACT)
    lines = (line.strip() for line in kernel.asm["ptx"].splitlines())
    return collections.Counter(line.split()[0] for line in lines if line and line[0].isalpha())


def compiles_for_amd(pair: PrecisionPair) -> bool:
    """Whether the decode kernel without assembly gives machine code for an MI300."""
    launch = DecodeLaunch(tokens=64, warps=4, stages=2, asm=False)
    keys, values = (sass.side_of(sass.Shape(), bits) for bits in (pair.k_bits, pair.v_bits))
    facts = {**decode_facts(keys, values, 8, 4, launch), "CAPPED": False}
    names = decode.decode_split.arg_names
    kinds = {name: sass.POINTERS.get(name) or sass.NUMBERS.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in facts.items()}
    source = ASTSource(decode.decode_split, kinds, constants)
    kernel = triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options={"num_warps": 4})
    return "hsaco" in kernel.asm


found = {
    "store": [store_instructions(*bits) for bits in ((2, 8), (4, 2), (8, 4))],
    "amd": [compiles_for_amd(PrecisionPair.parse(pair)) for pair in ("K8V4", "K2V2")],
}
sys.stdout.write(json.dumps(found))
