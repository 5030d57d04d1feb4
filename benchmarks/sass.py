"""Lane instructions per KV element of the decode loop, counted in machine code for GPUs that need not be here.

    python benchmarks/sass.py --arch 90
    python benchmarks/sass.py --arch 80 89 90 100 --json
    python benchmarks/sass.py --rows
    python benchmarks/sass.py --latents --gqa 16 --tokens 64 --warps 4 --stages 2

No GPU is needed: Triton compiles for any, and its own cuobjdump disassembles. The limit beside each row is what an H200
can issue while its memory delivers the elements (132 SMs, 4 instructions a cycle, 32 lanes, 1.755 GHz, 4.3 TB/s): a
kernel above it is bound by instructions, not by memory. The baseline dequantizes to bf16 and then multiplies, over the
same rows, launched as SGLang launches its own kernel and as ours is. With --rows the kernels that write and read rows
are counted, whole, beside what memory would let them have of a bf16 tensor that is read, or written. With --latents the
kernel that reads latents of 512 channels beside 64 rotary ones is counted, for a channel that is read once as key and
as value, beside twice what a channel takes of the kernel of keys and values for as many query heads; of the settings of
its launch, those that are given take the place of a server's.
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parent))

from gpu_parts import dequantize_then_dot
from gpu_parts.baselines import SGLANG_LAUNCH
from gpu_parts.pools import ALL_TRANSFORMS, LLAMA, HeadShape, empty_rows, row_format

from kvtuner.precision import (
    FITS,
    NATIVE_BITS,
    PACKED_BITS,
    THREE_BITS,
    WIDE_WORD_BITS,
    WORD_BITS,
    Fit,
    PrecisionPair,
    RowShape,
    ScaleLayout,
    effective_bits,
    num_slots,
)
from kvtuner.report.table import Table
from kvtuner.runtime_loader.kernels import decode, launch, read_rows
from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
from kvtuner.runtime_loader.kernels.latents.decode_latents import decode_latents
from kvtuner.runtime_loader.kernels.latents.launch_latents import latent_facts, latent_launch
from kvtuner.runtime_loader.kernels.launch_settings import EXACT, WIDE, DecodeLaunch, Device
from kvtuner.runtime_loader.kernels.storing import launch_store, store_rows
from kvtuner.runtime_loader.row_format import RowFormat

H200_LANES_PER_S: Final = 132 * 4 * 32 * 1.755e9
H200_BYTES_PER_S: Final = 4.3e12
PAIRS: Final = ("K4V4", "K8V8", "K8V4", "K4V2", "K2V2", "K3V3", "K4V3", "K3V2")
INSTRUCTION: Final = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", re.MULTILINE)
UNALIGNED: Final = ("num_splits", "num_requests", "num_tokens")
"""The arguments that need not be multiples of 16; pointers and strides are, as Triton finds when it launches."""
PLAIN: Final[dict[str, Any]] = {
    "EXTEND": False, "CAPPED": False, "BIASED": False, "RESIDUAL": 0, "SINKS": 0, "EXACT_PARTS": 0,
}  # fmt: skip
"""The facts of one query per request and of plain scores."""
UNDER_A_WINDOW: Final[dict[str, Any]] = {"BIASED": True, "RESIDUAL": 32, "EXACT_PARTS": 1}
"""Those that an exact window changes."""
ROWS_COLUMNS: Final = {
    "kernel": "{kernel}", "arch": "{arch}", "bits": "{bits}", "words": "{word_bits}", "kind": "{kind}", "fit": "{fit}",
    "per element": "{lane_instructions_per_element:.1f}", "H200 limit": "{limit:.1f}", "spills": "{spills}",
}  # fmt: skip
DECODE_COLUMNS: Final = {
    "arch": "{arch}", "pair": "K{k_bits}V{v_bits}", "heads": "{num_kv_heads}", "group": "{group_size}",
    "words": "{word_bits}", "kernel": "{whose}",
    "tokens/warps/stages": "{launch_row[tokens]}/{launch_row[warps]}/{launch_row[stages]}",
    "a program's": "{launch_row[heads]}",
    "per element": "{lane_instructions_per_element:.2f}", "H200 limit": "{limit:.2f}", "registers": "{registers}",
    "buffers": "{buffers}", "spills": "{loop_spills}", "converted": "{int_to_float}",
}  # fmt: skip
LATENT_COLUMNS: Final = {
    "arch": "{arch}", "bits": "{bits}", "group": "{group_size}", "query heads": "{gqa}",
    "tokens/warps/stages": "{launch_row[tokens]}/{launch_row[warps]}/{launch_row[stages]}",
    "a channel of a latent": "{lane_instructions_per_element:.2f}",
    "one of keys and one of values": "{as_key_and_as_value:.2f}", "registers": "{registers}", "buffers": "{buffers}",
    "spills": "{loop_spills}", "with a window": "{windowed_per_element:.2f}", "its spills": "{windowed_loop_spills}",
}  # fmt: skip
LATENT_SETTINGS: Final = ("tokens", "warps", "stages")
LATENT_CHANNELS: Final = 512
ROTARY_CHANNELS: Final = 64
"""The channels of a latent and beside it, as DeepSeek, Kimi and GLM have them."""
Count = dict[str, Any]
"""The counts of one compiled kernel; the fields are those of the JSON."""


def side_of(shape: HeadShape, bits: int, kind: str = "none", fit: Fit = "minmax") -> KernelSide:
    """Rows on the meta device, which take no memory."""
    return KernelSide.of(empty_rows("meta", torch.bfloat16, row_format(shape, bits, kind, fit=fit), 1024))


def type_of(name: str, facts: dict[str, Any]) -> str:
    """The type of a kernel's argument, as a server passes it."""
    if name in facts:
        return "constexpr"
    if not name.endswith("_ptr"):
        return "fp32" if name in ("scale", "cap") else "i32"
    if "rows" in name or "words" in name:
        native = facts.get(f"{name[0].upper()}_BITS", facts.get("BITS")) == NATIVE_BITS
        return "*bf16" if native else "*i16" if "rows" in name else "*i32"
    if name == "q_indptr_ptr" and facts.get("EXTEND", True):
        return "*i64"
    if "indptr" in name or "count" in name:
        return "*i32"
    if name.endswith(("pages_ptr", "spans_ptr", "device_ptr", "host_ptr")):
        return "*i64"
    kinds = {
        "slots_ptr": "*i64", "request_slots_ptr": "*i64", "positions_ptr": "*i32", "mask_ptr": "*u8",
        "mask_starts_ptr": "*i64", "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "out_ptr": "*bf16",
        "keys_ptr": "*bf16", "values_ptr": "*bf16", "rotary_q_ptr": "*bf16", "rotary_ptr": "*bf16",
    }  # fmt: skip
    return kinds.get(name, "*fp32")


def compiled(function: Any, facts: dict[str, Any], arch: int | GPUTarget, **options: Any) -> Any:
    """A kernel, compiled for a compute capability without the dot or a target; facts it does not take are left out."""
    names = function.arg_names
    kinds = {name: type_of(name, facts) for name in names}
    constants = {(names.index(name),): value for name, value in facts.items() if name in names}
    divisible = [name for name in names if kinds[name] not in ("constexpr", "fp32") and name not in UNALIGNED]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(function, kinds, constants, aligned)
    target = GPUTarget("cuda", arch, 32) if isinstance(arch, int) else arch
    return triton.compile(source, target=target, options=options)


def disassembled(kernel: Any, flag: str = "-sass") -> str:
    """The machine code of a kernel, or what cuobjdump prints by another flag."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([str(tool), flag, file.name], capture_output=True, text=True, check=True).stdout


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


def buffers_of(kernel: Any) -> int:
    """The blocks for which a kernel's pipeline has room, where rows are copied ahead; otherwise 1."""
    rings = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", kernel.asm["ttgir"])
    return min(map(int, rings), default=1)


def in_flight(loop: list[str]) -> int:
    """The groups of copies that the loop's waits leave on their way, at the least."""
    waits = [re.match(r"DEPBAR\.LE SB0, 0x([0-9a-f]+)", text) for text in loop]
    return min((int(wait[1], 16) for wait in waits if wait), default=0)


def counts_of(kernel: Any, settings: DecodeLaunch, elements: int) -> Count:
    """The counts of a kernel's loop and of what a program takes; a block of its loop reads so many elements."""
    code = disassembled(kernel)
    loop = loop_of(code)
    names = [text.split()[0] for text in loop]
    opcodes = collections.Counter(name.partition(".")[0] for name in names)
    registers = re.search(r"REG:(\d+)", disassembled(kernel, "-res-usage"))
    return {
        "launch_row": asdict(settings),
        "lane_instructions_per_element": lanes_per_element(len(names), settings.warps, elements, 3),
        "int_to_float": opcodes["I2F"] + opcodes["I2FP"], "shared_stores": opcodes["STS"],
        "waiting_loads": opcodes["LDG"],
        "spills": spills_of(code), "loop_spills": opcodes["LDL"] + opcodes["STL"],
        "buffers": buffers_of(kernel), "loads_in_flight": in_flight(loop),
        "registers": int(registers[1]) if registers else -1,
        "shared_bytes": kernel.metadata.shared,
        "async_copies_16B": sum(name.startswith("LDGSTS") and ".128" in name for name in names),
    }  # fmt: skip


def measure(
    pair: PrecisionPair, shape: HeadShape, arch: int, settings: DecodeLaunch, *, baseline: bool = False, **kind: bool
) -> Count:
    """The counts of a decode kernel; `kind` replaces facts of `PLAIN`."""
    sides = side_of(shape, pair.k_bits), side_of(shape, pair.v_bits)
    facts = {**launch.decode_facts(*sides, shape.gqa, settings), **PLAIN, **kind}
    function = dequantize_then_dot.decode_split if baseline else decode.decode_split
    kernel = compiled(function, facts, arch, **settings.options)
    layout = ScaleLayout(shape.group_size, shape.word_bits)
    rows = RowShape(shape.num_kv_heads, shape.head_dim, shape.head_dim, layout, layout)
    stored = effective_bits([pair], rows)
    return {
        "kernel": function.__name__, "arch": arch, "k_bits": pair.k_bits, "v_bits": pair.v_bits,
        "head_dim": shape.head_dim, "group_size": rows.k_layout.group_size, "word_bits": shape.word_bits,
        "num_kv_heads": shape.num_kv_heads, "gqa": shape.gqa, "baseline": baseline,
        **counts_of(kernel, settings, 2 * settings.heads * settings.tokens * shape.head_dim),
        "limit": round(H200_LANES_PER_S * float(stored) / 8 / H200_BYTES_PER_S, 2),
    }  # fmt: skip


def latent_kernels(args: argparse.Namespace) -> list[Count]:
    """The counts of the kernel of latents, beside twice those of the kernel of keys and values, for a channel read."""
    rows = []
    rotary = KernelSide.of(empty_rows("meta", torch.bfloat16, RowFormat(1, ROTARY_CHANNELS, None), 1024))
    for arch, bits in itertools.product(args.arch, PACKED_BITS):
        group_size = max(128, LATENT_CHANNELS // num_slots(bits))
        shape = HeadShape("", 1, args.gqa, LATENT_CHANNELS, group_size)
        given = {name: getattr(args, name) for name in LATENT_SETTINGS if getattr(args, name) is not None}
        latents, settings = side_of(shape, bits), replace(latent_launch(f"sm_{arch}", bits), **given)
        facts = {**latent_facts(latents, rotary, args.gqa, settings), **PLAIN}
        kernel, windowed = (
            compiled(decode_latents, {**facts, **options}, arch, **settings.options) for options in ({}, UNDER_A_WINDOW)
        )
        elements = settings.tokens * LATENT_CHANNELS
        of_windowed = counts_of(windowed, settings, elements)
        keys_and_values = HeadShape("", 1, args.gqa, 128)
        side = side_of(keys_and_values, bits)
        of_heads = Device(f"sm_{arch}", 0).launch(side, side, args.gqa)
        twice = 2 * measure(PrecisionPair(bits, bits), keys_and_values, arch, of_heads)["lane_instructions_per_element"]
        rows.append({
            "arch": arch, "bits": bits, "group_size": group_size, "gqa": args.gqa,
            **counts_of(kernel, settings, elements), "as_key_and_as_value": round(twice, 3),
            "windowed_per_element": of_windowed["lane_instructions_per_element"],
            "windowed_loop_spills": of_windowed["loop_spills"],
        })  # fmt: skip
    return rows


def lanes_per_element(instructions: int, warps: int, elements: int, digits: int) -> float:
    """The lane instructions of a program for each element that it handles."""
    return round(instructions * 32 * warps / elements, digits)


def rows_kernels(arch: int, heads: HeadShape) -> list[Count]:
    """The counts of the kernels that write and read rows, whole, as they are launched."""
    rows: list[Count] = []
    native = side_of(heads, NATIVE_BITS)

    def code_of(function: Any, facts: dict[str, Any]) -> str:
        return disassembled(compiled(function, facts, arch, **EXACT))

    kinds = ("none", "centered", "hadamard", ALL_TRANSFORMS)
    for bits, kind, fit in itertools.product((8, 4, 3, 2), kinds, FITS):
        side = side_of(heads, bits, kind, fit)
        row_bytes = row_format(heads, bits, kind).row_bytes(torch.bfloat16)
        limit = H200_LANES_PER_S * (row_bytes / (heads.num_kv_heads * heads.head_dim) + 2) / H200_BYTES_PER_S
        # A program of the store kernel writes keys or values: the instructions of the other are subtracted.
        stored = launch_store.store_facts(side, native)
        other = code_of(store_rows.store_rows, {**launch_store.store_facts(native, native), "TOKENS": stored["TOKENS"]})
        for function, facts, subtracted, tokens in (
            (store_rows.store_rows, stored, other, stored["TOKENS"]),
            (read_rows.read_side, launch.read_facts(side), "", launch.read_facts(side)["TOKENS"]),
        ):
            if fit != "minmax" and (function is read_rows.read_side or bits == 8):
                continue  # the same kernel
            code = code_of(function, facts)
            count = len(INSTRUCTION.findall(code)) - len(INSTRUCTION.findall(subtracted))
            lanes = lanes_per_element(count, EXACT["num_warps"], tokens * heads.head_dim, 1)
            rows.append({
                "kernel": function.__name__, "arch": arch, "bits": bits, "kind": kind, "fit": fit,
                "group_size": heads.group_size or heads.head_dim, "word_bits": heads.word_bits,
                "lane_instructions_per_element": lanes, "spills": spills_of(code), "limit": round(limit, 1),
            })  # fmt: skip
    return rows


def decode_kernels(args: argparse.Namespace) -> list[Count]:
    """The counts of our decode kernel and, unless that is left out, of the baseline at both launch settings."""
    rows = []
    for arch, heads, name, words in itertools.product(args.arch, args.kv_heads, args.pairs, args.word_bits):
        pair, shape = PrecisionPair.parse(name), HeadShape("", heads, args.gqa, args.head_dim, args.group_size, words)
        committed = Device(f"sm_{arch}", 0).launch(side_of(shape, pair.k_bits), side_of(shape, pair.v_bits), args.gqa)
        kernels = [(committed, False)]
        # The baseline has no codes of 3 bits and no short words.
        if not args.without_baseline and THREE_BITS not in (pair.k_bits, pair.v_bits) and words == WIDE_WORD_BITS:
            kernels += [(SGLANG_LAUNCH, True), (replace(committed, tile=WIDE, heads=1), True)]
        rows += [measure(pair, shape, arch, settings, baseline=baseline) for settings, baseline in kernels]
    return rows


def table_of(rows: list[Count], columns: dict[str, str], left: tuple[int, ...]) -> Table:
    """A table of counts; `columns` has the format of each cell by its header."""
    shown = [{**row, "whose": "baseline" if row.get("baseline") else "ours"} for row in rows]
    return Table(tuple(columns), [[text.format_map(row) for text in columns.values()] for row in shown], left=left)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[90], help="compute capability without the dot")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8])
    parser.add_argument("--gqa", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--group-size", type=int, help="channels of a scale; a head's by default")
    parser.add_argument("--word-bits", type=int, nargs="+", choices=WORD_BITS, default=[WIDE_WORD_BITS])
    parser.add_argument("--without-baseline", action="store_true")
    parser.add_argument("--rows", action="store_true", help="count the kernels that write and read rows instead")
    parser.add_argument("--latents", action="store_true", help="count the kernel of latents for --gqa query heads")
    for name in LATENT_SETTINGS:
        parser.add_argument(f"--{name}", type=int, help=f"{name} of the kernel of latents, 16 tokens a warp or more")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: what is interpreted cannot be compiled; unset it")
    if not args.latents and any(getattr(args, name) is not None for name in LATENT_SETTINGS):
        parser.error("--tokens, --warps and --stages are settings of the kernel of latents; add --latents")
    if args.rows:
        shapes = [
            replace(LLAMA, head_dim=args.head_dim, group_size=args.group_size, word_bits=words)
            for words in args.word_bits
        ]
        rows = [row for arch, heads in itertools.product(args.arch, shapes) for row in rows_kernels(arch, heads)]
        table = table_of(rows, ROWS_COLUMNS, left=(0, 1, 2, 3, 4))
    elif args.latents:
        rows = latent_kernels(args)
        table = table_of(rows, LATENT_COLUMNS, left=(4,))
    else:
        rows = decode_kernels(args)
        table = table_of(rows, DECODE_COLUMNS, left=(0, 1, 5, 6))
    print(json.dumps(rows, indent=1) if args.json else "\n".join(table.lines()))


if __name__ == "__main__":
    main()
