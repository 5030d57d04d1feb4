"""Makes the committed table of launch settings: for every pair of widths and head_dim, the fewest instructions.

    python benchmarks/launch_table.py --out runtime_loader/kernels/launches.json

No GPU is needed: candidates are compiled and their machine code counted (sass.py). Of those that spill nothing, fit in
the shared memory of the architecture and leave room for four warps on a processor, the one with the fewest lane
instructions per element is taken, on the first architecture; on the others the first of that order that fits there.
What a GPU would choose by time is another matter: `benchmarks/gpu.py --sweep` measures it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).parent))

import sass
from launch_candidates import CANDIDATES

from kvtuner.precision import PrecisionPair
from kvtuner.runtime_loader.kernels import decode
from kvtuner.runtime_loader.kernels.launch import decode_facts
from kvtuner.runtime_loader.kernels.settings import DecodeLaunch

BITS: Final = (2, 4, 8, 16)
HEAD_DIMS: Final = (64, 80, 96, 128, 256)
REGISTERS: Final = 65536
LEAST_WARPS: Final = 4
RESERVED_BYTES: Final = 1024
"""Of shared memory, for each program."""
SHARED: Final = {80: (164, 163), 89: (100, 99), 90: (228, 227), 100: (228, 227)}
"""KiB of a processor, and most of a program, by compute capability (CUDA C++ Programming Guide, technical specs)."""
ALIKE: Final = {80: ["sm_80", "sm_87"], 89: ["sm_86", "sm_89", "sm_120"], 90: ["sm_90"], 100: ["sm_100", "sm_103"]}
"""Architectures with the same limits."""
AMD: Final = ("gfx942", 64 << 10, DecodeLaunch(tokens=32, warps=4, stages=1, asm=False, resident=4))


def weighed(pair: PrecisionPair, head_dim: int, arch: int, launch: DecodeLaunch) -> dict[str, Any] | None:
    """A row for one candidate; None where it does not fit."""
    shape = sass.Shape(head_dim=head_dim, group_size=head_dim)
    try:
        row = sass.measure(pair, shape, arch, launch, baseline=False)
    except triton.runtime.errors.OutOfResources:
        return None
    of_processor, of_program = (1024 * size for size in SHARED[arch])
    resident = min(
        REGISTERS // (row.registers * 32 * launch.warps), of_processor // (row.shared_bytes + RESERVED_BYTES)
    )
    if row.spills or row.shared_bytes > of_program or resident * launch.warps < LEAST_WARPS:
        return None
    return {
        "k_bits": pair.k_bits, "v_bits": pair.v_bits, "head_dim": head_dim, "gqa": 1,
        "launch": asdict(replace(launch, resident=resident)),
        "lane_instructions_per_element": row.lane_instructions_per_element, "registers": row.registers,
        "shared_bytes": row.shared_bytes,
    }  # fmt: skip


def rows_of(pair: PrecisionPair, head_dim: int, archs: list[int]) -> list[dict[str, Any]]:
    """Rows of one pair and head_dim, one for each set of architectures that are launched alike."""
    found = {each: weighed(pair, head_dim, archs[0], each) for each in CANDIDATES}
    fitting = {each: row["lane_instructions_per_element"] for each, row in found.items() if row is not None}
    order = sorted(fitting, key=fitting.__getitem__)
    rows: list[dict[str, Any]] = []
    for arch in archs:
        weights = found if arch == archs[0] else {}
        row = next(filter(None, (weights.get(each) or weighed(pair, head_dim, arch, each) for each in order)))
        alike = [other for other in rows if other["launch"] == row["launch"]]
        if alike:
            alike[0]["archs"] += ALIKE[arch]
        else:
            rows.append({"archs": list(ALIKE[arch]), **row})
    name, most, launch = AMD
    shape = sass.Shape(head_dim=head_dim, group_size=head_dim)
    keys, values = (sass.side_of(shape, bits) for bits in (pair.k_bits, pair.v_bits))
    facts = {**decode_facts(keys, values, shape.gqa, launch), **sass.PLAIN}
    target = GPUTarget("hip", name, 64)
    kernel = sass.compiled(decode.decode_split, facts, target, num_warps=launch.warps, num_stages=launch.stages)
    if kernel.metadata.shared <= most:
        rows.append({
            "archs": [name], "k_bits": pair.k_bits, "v_bits": pair.v_bits, "head_dim": head_dim, "gqa": 1,
            "launch": asdict(launch), "shared_bytes": kernel.metadata.shared,
        })  # fmt: skip
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", nargs="+", default=[f"K{k}V{v}" for k, v in itertools.product(BITS, BITS)])
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--arch", type=int, nargs="+", default=[90, 80, 89, 100], help="the first decides")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: what is interpreted cannot be compiled; unset it")
    kinds = list(itertools.product(map(PrecisionPair.parse, args.pairs), args.head_dims))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        futures = [pool.submit(rows_of, *kind, args.arch) for kind in kinds]
        for future in tqdm(concurrent.futures.as_completed(futures), total=len(futures), unit="kind"):
            future.result()
    rows = [row for future in futures for row in future.result()]
    content = {
        "made_by": "python benchmarks/launch_table.py", "triton": triton.__version__,
        "measured": "machine code, not time", "rows": rows,
    }  # fmt: skip
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = json.dumps({**content, "rows": None}, indent=1).replace("null", "[\n" + lines + "\n ]")
    args.out.write_text(head + "\n")


if __name__ == "__main__":
    main()
