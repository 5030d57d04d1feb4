"""Run by test_kernels_compiled.py without the interpreter: compiles for GPUs that are not here, prints JSON."""

from __future__ import annotations

import collections
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import sass
from gpu_parts.pools import HeadShape

from kvtuner.precision import Fit, PrecisionPair
from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader.kernels import decode, extend_and_merge, queries, read_rows
from kvtuner.runtime_loader.kernels import window as kernels_of_window
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.launch import (
    LayerSides,
    decode_facts,
    merge_facts,
    read_facts,
    read_layer_facts,
)
from kvtuner.runtime_loader.kernels.launch_settings import EXACT, INTERPRETED, Device
from kvtuner.runtime_loader.kernels.pages.copy_pages import copy_pages
from kvtuner.runtime_loader.kernels.pages.page_mover import COPY_WARPS, copy_facts
from kvtuner.runtime_loader.kernels.pages.store_layers import store_layers
from kvtuner.runtime_loader.kernels.storing import store_rows
from kvtuner.runtime_loader.kernels.storing.launch_store import store_facts
from kvtuner.runtime_loader.packed_attention import PackedRows
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.transforms import TransformKind

HOPPER, AMD = 90, GPUTarget("hip", "gfx942", 64)
HEADS, GQA = 8, 4
VALUE_STEPS = ("hadamard",)
WINDOW = {"RESIDUAL": 32, "SINKS": 4, "EXACT_PARTS": 3}
WHOLE = [(bits, head_dim) for bits in (2, 4, 8) for head_dim in (64, 80, 96, 256) if head_dim * bits // 8 % 16 == 0]
WHOLE.append((3, 256))
"""Widths and head dimensions whose codes of a head are whole pieces of 16 bytes."""


def transformed(bits: int, head_dim: int, *, symmetric: bool = False, fit: Fit = "minmax") -> KernelSide:
    """Rows with every transform."""
    ones = torch.ones(HEADS, head_dim, dtype=torch.float16)
    every_step = Transform(TransformKind.parse("centered+balanced+hadamard"), ones, ones)
    spec = QuantSpec(bits, every_step, symmetric=symmetric, fit=fit)
    row_format = RowFormat(HEADS, head_dim, spec)
    rows = torch.empty(9, row_format.row_bytes(torch.bfloat16), dtype=torch.uint8, device="meta")
    return KernelSide.of(PackedRows(rows, row_format))


def instructions(kernel: Any) -> dict[str, int]:
    """Count the instructions of a kernel's PTX by name."""
    lines = (line.strip() for line in kernel.asm["ptx"].splitlines())
    return collections.Counter(line.split()[0] for line in lines if line and line[0].isalpha())


def stored(k_bits: int, v_bits: int, head_dim: int = 128, fit: Fit = "minmax") -> Any:
    """The store kernel, with every transform and both kinds of grid."""
    sides = transformed(k_bits, head_dim, fit=fit), transformed(v_bits, head_dim, symmetric=True, fit=fit)
    return sass.compiled(store_rows.store_rows, store_facts(*sides), HOPPER, **EXACT)


def read_back(bits: int, head_dim: int) -> Any:
    """The read kernel, with every transform."""
    return sass.compiled(read_rows.read_side, read_facts(transformed(bits, head_dim)), HOPPER, **EXACT)


def attending(pair: PrecisionPair, head_dim: int, target: int | GPUTarget, arch: str, **kind: Any) -> Any:
    """The kernel that reads rows, as the table launches it."""
    shape = HeadShape("", HEADS, GQA, head_dim)
    keys, values = (sass.side_of(shape, bits) for bits in (pair.k_bits, pair.v_bits))
    launch = Device(arch, 0).launch(keys, values, GQA, extend=kind.get("EXTEND", False))
    facts = {**decode_facts(keys, values, GQA, launch), **sass.PLAIN, **kind}
    return sass.compiled(decode.decode_split, facts, target, **launch.options)


def around(head_dim: int) -> list[Any]:
    """What runs before and after it."""
    side = transformed(4, head_dim)
    size = {"DIM": head_dim, "PADDED": side.padded}
    prepare = {"HEADS": HEADS, "GQA": GQA, "STEPS": side.steps, "BIASED": True, "DEPENDENT": True, **size}
    layer = LayerSides(side, side)
    fresh = {"HEADS": HEADS, "GQA": GQA, "CAPPED": True, "EXTEND": True, **layer.exact_facts, **layer.fresh}
    copying = {"HEADS": HEADS, "K_DIM": head_dim, "K_PADDED": side.padded, "V_DIM": head_dim, "V_PADDED": side.padded}
    kernels = [
        sass.compiled(queries.prepare_queries, prepare, HOPPER),
    ]
    for part, reads in enumerate(("all", "inside", "outside", "masked")):
        facts = {**fresh, **WINDOW, "READS": reads, "PART": min(part, 2)}
        kernels.append(sass.compiled(extend_and_merge.attend_fresh, facts, HOPPER, **layer.exact_options))
    facts = {**fresh, **WINDOW, "PART": 2}
    kernels.append(sass.compiled(kernels_of_window.attend_copies, facts, HOPPER, **layer.exact_options))
    for extending in (True, False):
        facts = {**copying, **WINDOW, "EXTEND": extending, "BLOCK": 32 if extending else 1}
        kernels.append(sass.compiled(kernels_of_window.store_copies, facts, HOPPER))
    for extending in (True, False):
        merge = {"STEPS": VALUE_STEPS, "EXTEND": extending, "EXACT_PARTS": 3, **merge_facts(INTERPRETED, 16), **size}
        kernels.append(sass.compiled(extend_and_merge.merge_splits, merge, HOPPER))
    return kernels


def spills(kernel: Any) -> int:
    """Count the registers that a kernel spills to memory."""
    return sass.spills_of(sass.disassembled(kernel))


def spills_in_loop(kernel: Any) -> int:
    """Count the registers that the decode kernel's loop spills; around it, where registers are limited, it may."""
    return sum(text.startswith(("LDL", "STL")) for text in sass.loop_of(sass.disassembled(kernel)))


def copies(bits: int, head_dim: int) -> tuple[int, float]:
    """Asynchronous copies of 16 bytes in the decode loop, and how many its codes are."""
    shape = HeadShape("", HEADS, GQA, head_dim)
    launch = Device("sm_90", 0).launch(sass.side_of(shape, bits), sass.side_of(shape, bits), GQA)
    row = sass.measure(PrecisionPair(bits, bits), shape, 90, launch)
    loaded_bits = 6 if bits == 3 else bits  # third bytes are loaded for either half of the units, beside zeros
    loaded_bytes = launch.heads * launch.tokens * 2 * head_dim * loaded_bits // 8
    return row["async_copies_16B"], loaded_bytes / (16 * 32 * launch.warps)


def waits(kernel: Any) -> tuple[str, int]:
    """What a kernel's PTX does first of loads, stores and waits for another kernel, and how often it waits."""
    found = re.findall(r"griddepcontrol\.wait|(?:ld|st)\.global", kernel.asm["ptx"])
    assert "griddepcontrol.launch_dependents" in kernel.asm["ptx"] or found[0] != "griddepcontrol.wait"
    return found[0], found.count("griddepcontrol.wait")


def dependent_kernels() -> list[Any]:
    """The kernels of a decode that begin early on Hopper."""
    side = transformed(4, 128)
    size = {"DIM": 128, "PADDED": side.padded, "DEPENDENT": True}
    prepare = {"HEADS": HEADS, "GQA": GQA, "STEPS": side.steps, "BIASED": True, **size}
    launch = Device("sm_90", 0).launch(side, side, GQA)
    merge = {"STEPS": VALUE_STEPS, "EXTEND": False, "EXACT_PARTS": 0, **merge_facts(launch, 16), **size}
    return [
        sass.compiled(queries.prepare_queries, prepare, HOPPER, **launch.launch_options),
        attending(PrecisionPair(4, 4), 128, HOPPER, "sm_90"),
        sass.compiled(extend_and_merge.merge_splits, merge, HOPPER, **launch.launch_options),
    ]


def moving(*, to_host: bool) -> list[str]:
    """What the kernel that moves pages does to memory."""
    facts = {"TO_HOST": to_host, **copy_facts(512)}
    kernel = sass.compiled(copy_pages, facts, HOPPER, num_warps=COPY_WARPS)
    return re.findall(r"[ls][dt][.]global\S*", kernel.asm["ptx"])


def moving_layers(k_bits: int, v_bits: int) -> list[dict[str, int]]:
    """The kernels that quantize layers into staged rows and read one back, with every transform."""
    keys, values = transformed(k_bits, 128), transformed(v_bits, 128)
    facts = {**store_facts(keys, values), "UNIT": 8, "K_UNIT": 8, "V_UNIT": 8}
    kernels = [
        sass.compiled(store_layers, facts, HOPPER, **EXACT),
        sass.compiled(read_rows.read_joined, read_layer_facts(keys, values), HOPPER, **EXACT),
    ]
    return [{**instructions(kernel), "spills": spills(kernel)} for kernel in kernels]


pairs = [PrecisionPair(k, v) for k, v in ((16, 16), (16, 4), (4, 16), (4, 4), (3, 3))]
found = {
    "store": [instructions(stored(*bits)) for bits in ((2, 8), (4, 2), (8, 4), (3, 3))]
    + [instructions(stored(*bits, fit="least_squares")) for bits in ((2, 4), (4, 2), (3, 3))],
    "store, other head_dims": [
        spills(stored(*bits, head_dim)) for bits in ((4, 2), (3, 3)) for head_dim in (80, 96, 256)
    ],
    "read": [instructions(read_back(bits, head_dim)) for bits, head_dim in ((2, 128), (4, 80), (8, 96), (3, 80))],
    "layers": moving_layers(4, 2) + moving_layers(8, 3),
    "dependent": [waits(kernel) for kernel in dependent_kernels()],
    "dependent, sm_80": waits(attending(PrecisionPair(4, 4), 128, 80, "sm_80"))[1],
    "pages": [moving(to_host=to_host) for to_host in (True, False)],
    "extending": [
        spills_in_loop(attending(pair, 128, HOPPER, "sm_90", EXTEND=True, CAPPED=capped, BIASED=pair.k_bits != 16))
        for pair in pairs
        for capped in (True, False)
    ]
    + [
        spills_in_loop(attending(PrecisionPair(8, 4), head_dim, HOPPER, "sm_90", EXTEND=True))
        for head_dim in (64, 128, 256)
    ],
    "windowed": [
        spills_in_loop(attending(pair, 128, HOPPER, "sm_90", EXTEND=extending, BIASED=True, **WINDOW))
        for pair in pairs
        for extending in (True, False)
    ],
    "around": [spills(kernel) for head_dim in (80, 128, 256) for kernel in around(head_dim)],
    "copies": [copies(bits, head_dim) for bits, head_dim in WHOLE],
    "amd": [
        "hsaco" in attending(PrecisionPair.parse(pair), 128, AMD, "gfx942").asm for pair in ("K8V4", "K3V3", "K2V2")
    ],
}
sys.stdout.write(json.dumps(found))
