"""Lane instructions per KV element of the decode loop, counted in machine code for GPUs that need not be here.

    python benchmarks/sass.py --arch 90
    python benchmarks/sass.py --arch 80 89 90 100 --json
    python benchmarks/sass.py --rows

No GPU is needed: Triton compiles for any, and its own cuobjdump disassembles. The limit beside each row is what an H200
can issue while its memory delivers the elements (132 SMs, 4 instructions a cycle, 32 lanes, 1.755 GHz, 4.3 TB/s): a
kernel above it is bound by instructions, not by memory. The baseline dequantizes to bf16 and then multiplies, over the
same rows, launched as SGLang launches its own kernel and as ours is. With --rows the kernels that write and read rows
are counted, whole, beside what memory would let them have of a bf16 tensor that is read, or written.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parent))

import dequantize_then_dot
from gpu_parts.pools import ALL_TRANSFORMS, LLAMA, empty_rows, row_format

from kvtuner.precision import NATIVE_BITS, PrecisionPair, RowShape, effective_bits
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.kernels import decode
from kvtuner.runtime_loader.kernels.launch import (
    EXACT,
    READ_TOKENS,
    STORED_TOKENS,
    decode_facts,
    read_facts,
    store_facts,
)
from kvtuner.runtime_loader.kernels.rows import read_side, store_rows
from kvtuner.runtime_loader.kernels.settings import DecodeLaunch, Device
from kvtuner.runtime_loader.kernels.side import KernelSide
from kvtuner.runtime_loader.row_format import RowFormat

H200_LANES_PER_S: Final = 132 * 4 * 32 * 1.755e9
H200_BYTES_PER_S: Final = 4.3e12
PAIRS: Final = ("K4V4", "K8V8", "K8V4", "K4V2", "K2V2")
SGLANG: Final = DecodeLaunch(tokens=32, warps=4, stages=2, asm=False)
"""The settings of SGLang's own decode kernel for grouped queries."""
INSTRUCTION: Final = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", re.MULTILINE)
NUMBERS: Final = {"scale": "fp32", "cap": "fp32"}
UNALIGNED: Final = ("num_splits", "num_requests", "num_tokens")
"""The arguments that need not be multiples of 16; pointers and strides are, as Triton finds when it launches."""
PLAIN: Final = {"EXTEND": False, "CAPPED": False, "BIASED": False}
"""The facts of one query per request and of plain scores."""


@dataclass(frozen=True, slots=True)
class RankShape:
    """The heads of one rank, their channels and groups."""

    num_kv_heads: int = 8
    gqa: int = 4
    head_dim: int = 128
    group_size: int = 128


@dataclass(frozen=True, slots=True)
class DecodeCount:
    """The counts of one compiled decode kernel; the fields are those of the JSON."""

    kernel: str
    arch: int
    k_bits: int
    v_bits: int
    head_dim: int
    group_size: int
    num_kv_heads: int
    gqa: int
    launch_row: dict[str, Any]
    baseline: bool
    lane_instructions_per_element: float
    int_to_float: int
    shared_stores: int
    spills: int
    registers: int
    shared_bytes: int
    async_copies_16B: int
    limit: float


def side_of(shape: RankShape, bits: int) -> KernelSide:
    """Rows on the meta device, which take no memory."""
    spec = None if bits == NATIVE_BITS else QuantSpec(bits, group_size=shape.group_size)
    row = RowFormat(shape.num_kv_heads, shape.head_dim, spec)
    return KernelSide.of(empty_rows("meta", torch.bfloat16, row, 1024))


def type_of(name: str, facts: dict[str, Any]) -> str:
    """The type of a kernel's argument, as a server passes it."""
    if name in facts:
        return "constexpr"
    if not name.endswith("_ptr"):
        return NUMBERS.get(name, "i32")
    if "rows" in name or "words" in name:
        native = facts.get(f"{name[0].upper()}_BITS", facts.get("BITS")) == NATIVE_BITS
        return "*bf16" if native else "*i16" if "rows" in name else "*i32"
    if name == "q_indptr_ptr" and facts.get("EXTEND", True):
        return "*i64"
    if "indptr" in name or "count" in name:
        return "*i32"
    if name.endswith(("pages_ptr", "spans_ptr", "device_ptr", "host_ptr")):
        return "*i64"
    kinds = {"slots_ptr": "*i64", "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "out_ptr": "*bf16"}
    return kinds.get(name, "*fp32")


def compiled(function: Any, facts: dict[str, Any], target: GPUTarget, **options: Any) -> Any:
    """A kernel, compiled for a device that need not be here; facts that it does not take are left out."""
    names = function.arg_names
    kinds = {name: type_of(name, facts) for name in names}
    constants = {(names.index(name),): value for name, value in facts.items() if name in names}
    divisible = [name for name in names if kinds[name] not in ("constexpr", "fp32") and name not in UNALIGNED]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    return triton.compile(ASTSource(function, kinds, constants, aligned), target=target, options=options)


def nvidia(arch: int) -> GPUTarget:
    """The target of a compute capability, written without the dot."""
    return GPUTarget("cuda", arch, 32)


def disassembled(binary: bytes) -> tuple[str, str]:
    """The machine code of a binary, and the resources that it takes."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        code, usage = (
            subprocess.run([str(tool), flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    return code, usage


def spills_of(code: str) -> int:
    """The number of registers that a kernel writes to memory or reads from it."""
    return sum(match[2].split()[0].startswith(("LDL", "STL")) for match in INSTRUCTION.finditer(code))


def loop_of(code: str) -> list[str]:
    """The instructions of the longest loop with a matrix product: from the target of a jump back to the jump."""
    lines = [(int(match[1], 16), re.sub(r"^@!?U?P\w+\s+", "", match[2])) for match in INSTRUCTION.finditer(code)]
    loops = []
    for address, text in lines:
        jump = re.match(r"BRA\S*\s+(?:\S+,\s*)?(?:`\(\S+\)|0x([0-9a-f]+))", text)
        if jump and jump[1] and int(jump[1], 16) < address:
            loops.append([inside for at, inside in lines if int(jump[1], 16) <= at <= address])
    return max((loop for loop in loops if any("MMA" in text for text in loop)), key=len)


def measure(
    pair: PrecisionPair, shape: RankShape, arch: int, launch: DecodeLaunch, *, baseline: bool = False, **kind: bool
) -> DecodeCount:
    """The counts of a decode kernel; `kind` replaces facts of `PLAIN`."""
    keys, values = side_of(shape, pair.k_bits), side_of(shape, pair.v_bits)
    facts = {**decode_facts(keys, values, shape.gqa, launch), **PLAIN, **kind}
    function = dequantize_then_dot.decode_split if baseline else decode.decode_split
    kernel = compiled(function, facts, nvidia(arch), num_warps=launch.warps, num_stages=launch.stages)
    code, usage = disassembled(kernel.asm["cubin"])
    loop = loop_of(code)
    names = collections.Counter(text.split()[0] for text in loop)
    kinds = collections.Counter({name.partition(".")[0]: 0 for name in names})
    for name, count in names.items():
        kinds[name.partition(".")[0]] += count
    elements = 2 * launch.tokens * shape.head_dim
    group = shape.group_size
    stored = effective_bits([pair], RowShape(shape.num_kv_heads, shape.head_dim, shape.head_dim, group, group))
    registers = re.search(r"REG:(\d+)", usage)
    return DecodeCount(
        kernel=function.__name__,
        arch=arch,
        k_bits=pair.k_bits,
        v_bits=pair.v_bits,
        head_dim=shape.head_dim,
        group_size=group,
        num_kv_heads=shape.num_kv_heads,
        gqa=shape.gqa,
        launch_row=asdict(launch),
        baseline=baseline,
        lane_instructions_per_element=round(len(loop) * 32 * launch.warps / elements, 3),
        int_to_float=sum(kinds[name] for name in ("I2F", "I2FP")),
        shared_stores=kinds["STS"],
        spills=spills_of(code),
        registers=int(registers[1]) if registers else -1,
        shared_bytes=kernel.metadata.shared,
        async_copies_16B=sum(n for name, n in names.items() if name.startswith("LDGSTS") and ".128" in name),
        limit=round(H200_LANES_PER_S * float(stored) / 8 / H200_BYTES_PER_S, 2),
    )


def rows_kernels(arch: int) -> list[dict[str, Any]]:
    """The counts of the kernels that write and read rows, whole, as they are launched."""
    shape = LLAMA
    rows: list[dict[str, Any]] = []
    native = side_of(RankShape(), NATIVE_BITS)
    for bits, kind in itertools.product((8, 4, 2), ("none", "centered", "hadamard", ALL_TRANSFORMS)):
        row = row_format(shape, bits, kind)
        side = KernelSide.of(empty_rows("meta", torch.bfloat16, row, 9))
        num_bytes, elements = row.row_bytes(torch.bfloat16), shape.num_kv_heads * shape.head_dim
        # A program of the store kernel writes keys or values: the instructions of the other are subtracted.
        for function, facts, off, tokens in (
            (store_rows, store_facts(side, native), store_facts(native, native), STORED_TOKENS),
            (read_side, read_facts(side), None, READ_TOKENS),
        ):
            kernel = compiled(function, facts, nvidia(arch), **EXACT)
            code, _ = disassembled(kernel.asm["cubin"])
            count = len(INSTRUCTION.findall(code))
            if off is not None:
                other, _ = disassembled(compiled(function, off, nvidia(arch), **EXACT).asm["cubin"])
                count -= len(INSTRUCTION.findall(other))
            per_element = count * 32 * EXACT["num_warps"] / (tokens * shape.head_dim)
            rows.append({
                "kernel": function.__name__, "arch": arch, "bits": bits, "kind": kind,
                "lane_instructions_per_element": round(per_element, 1),
                "spills": spills_of(code),
                "limit": round(H200_LANES_PER_S * (num_bytes / elements + 2) / H200_BYTES_PER_S, 1),
            })  # fmt: skip
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[90], help="compute capability without the dot")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8])
    parser.add_argument("--gqa", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--without-baseline", action="store_true")
    parser.add_argument("--rows", action="store_true", help="count the kernels that write and read rows instead")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: what is interpreted cannot be compiled; unset it")
    if args.rows:
        show_rows_kernels([row for arch in args.arch for row in rows_kernels(arch)], as_json=args.json)
        return
    rows = []
    for arch, heads, name in itertools.product(args.arch, args.kv_heads, args.pairs):
        pair, shape = PrecisionPair.parse(name), RankShape(heads, args.gqa, 128, args.group_size)
        committed = Device(f"sm_{arch}", 0).launch(side_of(shape, pair.k_bits), side_of(shape, pair.v_bits), args.gqa)
        kernels = [(committed, False)]
        if not args.without_baseline:
            kernels += [(SGLANG, True), (committed, True)]
        rows += [measure(pair, shape, arch, launch, baseline=baseline) for launch, baseline in kernels]
    show_decode_kernels(rows, as_json=args.json)


def show_rows_kernels(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print the counts of the kernels that write and read rows."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print("kernel      arch  bits  kind                         per element  H200 limit  spills")
    for row in rows:
        print(
            f"{row['kernel']:<12}{row['arch']:<6}{row['bits']:<6}{row['kind']:<29}"
            f"{row['lane_instructions_per_element']:>11.1f}{row['limit']:12.1f}{row['spills']:8}"
        )


def show_decode_kernels(rows: list[DecodeCount], *, as_json: bool) -> None:
    """Print the counts of the decode kernels."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print("arch  pair  heads  kernel    tokens/warps/stages  per element  H200 limit  registers  spills  converted")
    for row in rows:
        launch = "/".join(str(row.launch_row[name]) for name in ("tokens", "warps", "stages"))
        print(
            f"{row.arch:<6}K{row.k_bits}V{row.v_bits}{row.num_kv_heads:7}  {'baseline' if row.baseline else 'ours':<10}"
            f"{launch:<19}{row.lane_instructions_per_element:>13.2f}{row.limit:12.2f}{row.registers:11}{row.spills:8}"
            f"{row.int_to_float:11}"
        )


if __name__ == "__main__":
    main()
