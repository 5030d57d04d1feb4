"""Makes the committed table of launch settings: for every pair of widths and head_dim, the fewest instructions.

    python benchmarks/launch_table.py --out runtime_loader/kernels/launches.json

No GPU is needed: candidates are compiled for sm_90 and their machine code counted (sass.py). They stand in the order of
their instructions for an element. The first is taken whose loop spills nothing, that fits in the shared memory of the
architecture and leaves room for four warps on a processor. Likewise for wide tiles: many queries of a KV head, or
several of a request. Programs of two KV heads, whose warps count twice, are taken where they take fewer instructions;
at 8 bits of both sides on sm_90 alone: there they save a tenth of the bytes from the last cache, and so few of them fit
a processor that the last ones leave it idle, by the prediction; an H200 took 292 us with two heads, and 345 with the
best of one (K8V8, 32 requests of 16,384 tokens). Nor on sm_120 at 8 bits of either side, whose loop spills there alone:
11 registers at K8V4.
The choice by time on a GPU may differ: `benchmarks/gpu.py --sweep` measures it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import triton
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent))

import sass
from gpu_parts.pools import LLAMA, HeadShape
from gpu_parts.speed import CANDIDATES, JOINED_CANDIDATES

from kvtuner.precision import ALL_BITS, NATIVE_BITS, PrecisionPair, num_slots
from kvtuner.runtime_loader.kernels.launch_settings import LAUNCH_KINDS, NARROW, WIDE, DecodeLaunch

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD_DIMS: Final = (64, 80, 96, 128, 256)
GROUPS: Final = (1, 2, 4)
REGISTERS: Final = 16384
"""The registers of a quarter of a processor, which holds whole warps, in steps of 8 for each thread."""
LEAST_WARPS: Final = 4
WIDE_BITS: Final = 8
"""The bits of both sides at which two heads of a program save little, unless they were measured to be faster."""
MEASURED: Final = 90
"""The compute capability on which two heads were faster at 8 bits of both sides too."""
SPILLING: Final = 120
"""The compute capability on which two heads spill at 8 bits of a side; what is counted is sm_90's."""
MOST_RESIDENT: Final = 12
"""The programs of a processor up to which a server keeps room for what they write (`DECODED_PARTS`)."""
RESERVED_BYTES: Final = 1024
"""The bytes of shared memory that each program needs besides its own."""
LIMITS: Final = {
    80: (164, 163, 64, 32), 89: (100, 99, 48, 24), 90: (228, 227, 64, 32), 100: (228, 227, 64, 32),
    120: (100, 99, 48, 24),
}  # fmt: skip
"""The limits of a compute capability: KiB of a processor and of a program, warps and programs of a processor.

CUDA C++ Programming Guide, technical specifications.
"""
ALIKE: Final = {
    80: ["sm_80", "sm_87"], 89: ["sm_86", "sm_89"], 90: ["sm_90"], 100: ["sm_100", "sm_103"], 120: ["sm_120"],
}  # fmt: skip
"""Architectures with the same limits."""
AMD: Final = DecodeLaunch(tokens=32, warps=4, stages=1, asm=False, tile=WIDE)
"""The settings of AMD, which are not chosen: the plain kernel with the least shared memory.

Tiles are wide, since its matrix instructions take no narrow ones.
"""
COUNTS: Final = ("lane_instructions_per_element", "registers", "shared_bytes", "buffers")
COMPILED: Final = 90
"""The architecture that is counted: others differ by what a processor holds, not by how much a program takes."""


@dataclass(frozen=True, slots=True)
class CompiledLaunch:
    """Launch settings, and the counts of the kernel that is compiled with them."""

    launch: DecodeLaunch
    count: sass.Count

    def resident(self, arch: int) -> int:
        """Programs that a processor of an architecture holds; 0 where it cannot run or leaves too few warps."""
        of_processor, of_program, most_warps, most_programs = LIMITS[arch]
        warps = 4 * (REGISTERS // (-(-self.count["registers"] // 8) * 8 * 32))
        in_memory = (of_processor << 10) // (self.count["shared_bytes"] + RESERVED_BYTES)
        resident = min(min(warps, most_warps) // self.launch.warps, in_memory, most_programs, MOST_RESIDENT)
        fits = not self.count["loop_spills"] and self.count["shared_bytes"] <= of_program << 10
        # A warp of two heads has twice the loads on their way.
        return resident if fits and resident * self.launch.warps * self.launch.heads >= LEAST_WARPS else 0

    @property
    def instructions(self) -> float:
        """The lane instructions of its loop for an element."""
        return float(self.count["lane_instructions_per_element"])

    def row(self, arch: int) -> dict[str, Any]:
        """The settings as the table has them for an architecture."""
        return settings_of(replace(self.launch, resident=self.resident(arch)))


def settings_of(launch: DecodeLaunch) -> dict[str, Any]:
    """The settings that the table has; whether launches may overlap follows from the architecture."""
    return {name: value for name, value in asdict(launch).items() if name != "dependent"}


def chosen(
    pair: PrecisionPair, shape: HeadShape, tile: int, candidates: tuple[DecodeLaunch, ...] = CANDIDATES
) -> dict[int, CompiledLaunch]:
    """The first candidate for a tile that each architecture takes, by its compute capability."""
    found: dict[int, CompiledLaunch] = {}
    for candidate in candidates:
        launch = replace(candidate, tile=tile)
        try:
            compiled = CompiledLaunch(launch, sass.measure(pair, shape, COMPILED, launch, EXTEND=tile == WIDE))
        except triton.runtime.errors.OutOfResources:
            continue
        for arch in LIMITS:
            if arch not in found and compiled.resident(arch):
                found[arch] = compiled
        if len(found) == len(LIMITS):
            break
    return found


def is_joined(arch: int, pair: PrecisionPair, two_heads: CompiledLaunch | None, one_head: CompiledLaunch) -> bool:
    """Whether programs of an architecture have two heads where they can."""
    if two_heads is None or NATIVE_BITS in (pair.k_bits, pair.v_bits):
        return False
    saves_little = pair.k_bits == pair.v_bits == WIDE_BITS and arch != MEASURED
    spills = arch == SPILLING and WIDE_BITS in (pair.k_bits, pair.v_bits)
    return not (saves_little or spills) and two_heads.instructions < one_head.instructions


def rows_of(pair: PrecisionPair, shape: HeadShape) -> list[dict[str, Any]]:
    """The rows of one pair and shape, one for each set of architectures that are launched alike."""
    groups = shape.head_dim // (shape.group_size or shape.head_dim)
    key = {"k_bits": pair.k_bits, "v_bits": pair.v_bits, "head_dim": shape.head_dim, "groups": groups, "gqa": 1}
    narrow, wide = chosen(pair, shape, NARROW), chosen(pair, shape, WIDE)
    if len(narrow) < len(LIMITS) or len(wide) < len(LIMITS):
        raise SystemExit(f"no candidate fits {pair} of head_dim {shape.head_dim}")
    joined = chosen(pair, shape, NARROW, JOINED_CANDIDATES)
    rows: list[dict[str, Any]] = []
    for arch, names in ALIKE.items():
        counts = {name: narrow[arch].count[name] for name in COUNTS}
        launches = {"launch": narrow[arch].row(arch), "wide": wide[arch].row(arch)}
        if is_joined(arch, pair, joined.get(arch), narrow[arch]):
            launches["joined"] = joined[arch].row(arch)
            counts["joined_counts"] = {name: joined[arch].count[name] for name in COUNTS}
        alike = next((row for row in rows if all(row.get(kind) == launches.get(kind) for kind in LAUNCH_KINDS)), None)
        if alike is not None:
            alike["archs"] += names
        else:
            rows.append({"archs": list(names), **key, **launches, **counts})
    return [*rows, {"archs": ["gfx942"], **key, "launch": settings_of(AMD), "wide": settings_of(AMD)}]


def key_of(row: dict[str, Any]) -> tuple[int, ...]:
    """What a row is for, beside its architectures."""
    return tuple(row[name] for name in ("k_bits", "v_bits", "head_dim", "groups"))


def pairs_and_shapes(
    pairs: list[PrecisionPair], head_dims: list[int], counts: list[int]
) -> Iterator[tuple[PrecisionPair, HeadShape]]:
    """All pairs and head dimensions with so many groups of whole slots, as far as these exist."""
    for pair, head_dim, groups in itertools.product(pairs, head_dims, counts):
        packed = [bits for bits in (pair.k_bits, pair.v_bits) if bits != NATIVE_BITS]
        power_of_two = head_dim & (head_dim - 1) == 0
        if groups == 1 or (packed and power_of_two and all(num_slots(bits) >= groups for bits in packed)):
            yield pair, replace(LLAMA, head_dim=head_dim, group_size=head_dim // groups)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", nargs="+", default=[f"K{k}V{v}" for k, v in itertools.product(ALL_BITS, repeat=2)])
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--groups", type=int, nargs="+", default=list(GROUPS), help="the scales of a head")
    parser.add_argument("--keep", type=Path, help="a table whose rows stay that are not made anew")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: what is interpreted cannot be compiled; unset it")
    listed = list(pairs_and_shapes([PrecisionPair.parse(pair) for pair in args.pairs], args.head_dims, args.groups))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        futures = [pool.submit(rows_of, *pair_and_shape) for pair_and_shape in listed]
        for future in tqdm(concurrent.futures.as_completed(futures), total=len(futures), unit="kind"):
            future.result()
    rows = [row for future in futures for row in future.result()]
    if args.keep is not None:
        replaced = {key_of(row) for row in rows}
        rows += [row for row in json.loads(args.keep.read_text())["rows"] if key_of(row) not in replaced]
    rows.sort(key=key_of)
    content = {
        "made_by": "python benchmarks/launch_table.py", "triton": triton.__version__,
        "measured": "machine code, not time", "rows": rows,
    }  # fmt: skip
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = json.dumps({**content, "rows": None}, indent=1).replace("null", "[\n" + lines + "\n ]")
    args.out.write_text(head + "\n")


if __name__ == "__main__":
    main()
