"""Predicts from machine code what share of a GPU's memory bandwidth decoding reaches, before it has run on that GPU.

    python benchmarks/sass_model.py                      # 32 requests of 16k tokens, on every GPU
    python benchmarks/sass_model.py --batch 1 --length 8192 --layer

**Nothing is measured**: predictions stand in benchmarks/results/predictions.md to be compared with runs. Kernels are
compiled for each GPU as the launch table has them (sass.py), and the control bits of each instruction are read: the
cycles until the next one may follow, the barrier that its result clears, and the barriers that it waits for. One
processor is then simulated, instruction by instruction (gpu_parts/simulated_gpu.py).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

sys.path.insert(0, str(Path(__file__).parent))

import sass
from gpu_parts.pools import LLAMA, HeadShape, row_format
from gpu_parts.sass_listing import instructions_of, path_of
from gpu_parts.simulated_gpu import ENDLESS, GPUS, SimulatedGpu, WarpWork, simulated_cycles

from kvtuner.precision import PrecisionPair
from kvtuner.report.table import Table
from kvtuner.runtime_loader.kernels import decode, extend_and_merge, launch, queries
from kvtuner.runtime_loader.kernels.launch_settings import Device
from kvtuner.runtime_loader.kernels.transform_steps import changes_queries
from kvtuner.transforms import TRANSFORMS

if TYPE_CHECKING:
    from gpu_parts.sass_listing import Instruction

    from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
    from kvtuner.runtime_loader.kernels.launch_settings import DecodeLaunch

LAUNCH_SECONDS, DEPENDENT_SECONDS = 1.5e-6, 0.8e-6
"""The time from one kernel's end to the next one's first instructions, inside a CUDA graph, and where that one began
early and waits: estimates."""
HALF: Final = 0.5
WARPS: Final = 4
"""The warps of a program of the kernels around decode's, Triton's default."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Requests that decode at once, all of one length."""

    num_requests: int
    length: int


@dataclass(frozen=True, slots=True)
class DecodeGrid:
    """The programs of the decode kernel for a load.

    Attributes:
        programs: The programs that have tokens.
        blocks: The blocks of tokens of each.
        parts: The parts of a request that have tokens.
        splits: The parts of a request, those without tokens among them.
    """

    settings: DecodeLaunch
    programs: int
    blocks: int
    parts: int
    splits: int

    @classmethod
    def of(cls, keys: KernelSide, values: KernelSide, gqa: int, gpu: SimulatedGpu, load: DecodeLoad) -> DecodeGrid:
        """The grid as a server launches it."""
        device = Device(f"sm_{gpu.arch}", gpu.processors)
        settings = device.launch(keys, values, gqa, num_requests=load.num_requests)
        tiles = settings.programs(keys.num_heads, gqa)
        splits = device.splits(settings, load.num_requests, tiles)
        settings = device.for_batch(settings, load.num_requests, tiles)
        per_split = max(load.length, settings.min_split * splits) / splits
        blocks = math.ceil(per_split / settings.tokens)
        parts = math.ceil(load.length / (blocks * settings.tokens))
        return cls(settings, load.num_requests * tiles * parts, blocks, parts, splits)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction of one layer's decode kernel.

    Attributes:
        seconds: The time of the kernel.
        share: The share of the bandwidth that a copy reaches.
        instructions: The part of that time that instructions take by themselves, were every load there at once.
        cache: The part of that time that bytes from the last cache take by themselves.
        share_beside_cache: The share that it would reach if the last cache had no limit.
    """

    seconds: float
    share: float
    instructions: float
    cache: float
    share_beside_cache: float

    @property
    def waits_for(self) -> str:
        """What takes the most of the time; delays where instructions and bytes leave more of it than they take."""
        parts = {"memory": self.share, "last cache": self.cache, "instructions": self.instructions}
        largest = max(parts, key=parts.__getitem__)
        return largest if parts[largest] > HALF else "delays"


@functools.cache
def program_of(function: Any, facts: tuple[tuple[str, Any], ...], arch: int, **options: int) -> list[Instruction]:
    """The machine code of a kernel with these facts."""
    return instructions_of(sass.disassembled(sass.compiled(function, dict(facts), arch, **options)))


def decode_work(
    pair: PrecisionPair, shape: HeadShape, gpu: SimulatedGpu, load: DecodeLoad
) -> tuple[WarpWork, DecodeGrid]:
    """What a warp of the decode kernel does, and its grid."""
    keys, values = sass.side_of(shape, pair.k_bits), sass.side_of(shape, pair.v_bits)
    grid = DecodeGrid.of(keys, values, shape.gqa, gpu, load)
    facts = {**launch.decode_facts(keys, values, shape.gqa, grid.settings), **sass.PLAIN}
    program = program_of(decode.decode_split, tuple(facts.items()), gpu.arch, **grid.settings.options)
    tokens = grid.blocks * grid.settings.tokens
    copied = tokens * grid.settings.heads * shape.head_dim * (pair.k_bits + pair.v_bits) / 8 / grid.settings.warps
    return WarpWork(path_of(program, grid.blocks), copied), grid


def around_work(
    pair: PrecisionPair, shape: HeadShape, gpu: SimulatedGpu, grid: DecodeGrid, kind: str
) -> dict[str, tuple[WarpWork, int]]:
    """What a warp of the kernels before and behind the decode kernel does, and a request's programs of each."""
    keys, values = (sass.side_of(shape, bits, own) for bits, own in ((pair.k_bits, kind), (pair.v_bits, "none")))
    settings, found = grid.settings, dict[str, tuple[WarpWork, int]]()
    shared: dict[str, Any] = {"DIM": keys.head_dim, "PADDED": keys.padded, "DEPENDENT": settings.dependent}
    if changes_queries(keys.steps):
        facts: dict[str, Any] = {
            "HEADS": keys.num_heads,
            "GQA": shape.gqa,
            "STEPS": keys.steps,
            "BIASED": False,
            **shared,
        }
        program = program_of(queries.prepare_queries, tuple(facts.items()), gpu.arch, **settings.launch_options)
        found["queries"] = WarpWork(path_of(program, 1)), keys.num_heads
    facts = {"STEPS": values.steps, "EXTEND": False, "EXACT_PARTS": 0, **shared}
    facts |= launch.merge_facts(settings, grid.splits)
    program = program_of(extend_and_merge.merge_splits, tuple(facts.items()), gpu.arch, **settings.launch_options)
    rounds = math.ceil(grid.parts / launch.MERGED_SPLITS)
    found["merge"] = WarpWork(path_of(program, rounds)), shape.num_heads
    return found


def layer_seconds(
    pair: PrecisionPair, shape: HeadShape, gpu: SimulatedGpu, load: DecodeLoad, kind: str
) -> dict[str, float]:
    """Predict the time of one layer's attention in a decode by kernel, and of its launches."""
    decoding = predicted(pair, shape, gpu, load)
    _, grid = decode_work(pair, shape, gpu, load)
    found = {"decode": decoding.seconds}
    for name, (work, programs) in around_work(pair, shape, gpu, grid, kind).items():
        count = WARPS * math.ceil(load.num_requests * programs / gpu.processors)
        found[name] = simulated_cycles(work, gpu, count, resident=16 * WARPS) / gpu.hertz
    each = DEPENDENT_SECONDS if grid.settings.dependent else LAUNCH_SECONDS
    return {**found, "launches": LAUNCH_SECONDS + each * (len(found) - 1)}


def predicted(pair: PrecisionPair, shape: HeadShape, gpu: SimulatedGpu, load: DecodeLoad) -> Prediction:
    """Predict one layer's decode kernel."""
    work, grid = decode_work(pair, shape, gpu, load)
    warps = grid.settings.warps
    count, resident = warps * math.ceil(grid.programs / gpu.processors), warps * grid.settings.resident
    endless_cache = replace(gpu, cache_bytes_per_s=ENDLESS)
    immediate = replace(endless_cache, bytes_per_s=ENDLESS, memory_cycles=0, cache_cycles=0)
    cycles, beside_cache, issued = (
        simulated_cycles(work, each, count, resident) for each in (gpu, endless_cache, immediate)
    )
    per_token = sum(stored_bytes(shape, bits) for bits in (pair.k_bits, pair.v_bits))
    seconds = cycles / gpu.hertz
    share = load.num_requests * load.length * per_token / seconds / gpu.bytes_per_s
    cache = count * work.cache_bytes * gpu.processors / gpu.cache_bytes_per_s / seconds
    return Prediction(seconds, share, issued / cycles, cache, share * cycles / beside_cache)


def stored_bytes(shape: HeadShape, bits: int) -> int:
    """The bytes of codes and words of a token's keys or values."""
    return row_format(shape, bits).row_bytes(torch.bfloat16)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=["K8V8", "K8V4", "K4V4", "K4V2", "K3V3", "K2V2"])
    parser.add_argument("--gpus", nargs="+", choices=[gpu.name for gpu in GPUS], default=[gpu.name for gpu in GPUS])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--layer", action="store_true", help="the time of all kernels of a layer instead")
    parser.add_argument("--kind", default="hadamard", choices=sorted(TRANSFORMS), help="the keys' transform, for that")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: what is interpreted cannot be compiled; unset it")
    load = DecodeLoad(args.batch, args.length)
    rows: list[dict[str, str]] = []
    for name, gpu in itertools.product(args.pairs, [gpu for gpu in GPUS if gpu.name in args.gpus]):
        pair, row = PrecisionPair.parse(name), {"pair": name, "GPU": gpu.name}
        if args.layer:
            parts = layer_seconds(pair, LLAMA, gpu, load, args.kind)
            microseconds = {"queries": 0.0, **parts, "layer": sum(parts.values())}
            rows.append(row | {part: f"{1e6 * seconds:.1f}" for part, seconds in microseconds.items()})
        else:
            found = predicted(pair, LLAMA, gpu, load)
            names = ("share", "instructions", "cache", "share_beside_cache")
            cells = {name.replace("_", " "): f"{getattr(found, name):.2f}" for name in names}
            rows.append(row | {"us": f"{1e6 * found.seconds:.1f}"} | cells | {"waits for": found.waits_for})
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print("\n".join(Table(tuple(rows[0]), [list(row.values()) for row in rows], left=(0, 1)).lines()))


if __name__ == "__main__":
    main()
