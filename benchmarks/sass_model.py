"""Predicts from machine code what share of a GPU's memory bandwidth decoding reaches, before it has run on that GPU.

    python benchmarks/sass_model.py                      # 32 requests of 16k tokens, on every GPU
    python benchmarks/sass_model.py --batch 1 --length 8192 --pairs K4V4

**Nothing is measured**: predictions stand in benchmarks/results/predictions.md to be compared with runs. Kernels are
compiled for each GPU as the launch table has them (sass.py), and the control bits of each instruction are read: the
cycles until the next one may follow, the barrier that its result clears, and the barriers that it waits for. One
processor is then simulated, instruction by instruction: four schedulers that issue one each cycle, the pipes behind
them, and two queues that all its loads share, of its parts of the last cache's and of memory's bandwidth. Not
modelled: instruction caches, register banks, the order in which memory serves processors, other kernels.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import os
import re
import sys
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

sys.path.insert(0, str(Path(__file__).parent))

import sass
from gpu_parts.pools import LLAMA, HeadShape, row_format
from sectors import SECTOR_BYTES

from kvtuner.precision import PrecisionPair
from kvtuner.report.table import Table
from kvtuner.runtime_loader.kernels import decode, launch
from kvtuner.runtime_loader.kernels.launch_settings import Device

if TYPE_CHECKING:
    from kvtuner.runtime_loader.kernels.kernel_side import KernelSide
    from kvtuner.runtime_loader.kernels.launch_settings import DecodeLaunch

SCHEDULERS: Final = 4
"""The schedulers of a processor, each with warps and pipes of its own."""
NO_BARRIER: Final = 7
LAUNCH_SECONDS: Final = 2.5e-6
"""The time from one kernel's end to the next one's first instructions, inside a CUDA graph: an estimate."""
ENCODED: Final = re.compile(
    r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;\s+/\* 0x([0-9a-f]{16}) \*/\s*\n\s+/\* 0x([0-9a-f]{16}) \*/", re.MULTILINE
)
"""An instruction as cuobjdump prints it: address, text, and the lower and the upper half of its 128 bits."""
PIPES: Final = {
    "control": (
        "BRA", "EXIT", "BAR", "BSSY", "BSYNC", "NOP", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "CALL", "RET", "ERRBAR",
        "CCTL", "ELECT", "ACQBULK", "PREEXIT",
    ),
    "fma": ("FADD", "FMUL", "FFMA", "HADD2", "HMUL2", "HFMA2"),
    "imad": ("IMAD",),
    "xu": ("MUFU", "F2F.", "F2I.", "I2F.", "POPC", "FLO", "BREV"),
    "tensor": ("HMMA",),
    "memory": ("LDG", "LDS", "LDC", "LDL", "ST", "SHFL", "ATOM", "RED", "MATCH"),
    "uniform": ("U",),
}  # fmt: skip
"""The pipes of opcodes, by how these begin; the first match counts, and all others are the integer pipe's."""
CYCLES: Final = {"imad": 2, "alu": 2, "xu": 8, "memory": 4, "uniform": 1, "control": 1}
"""The cycles for which a warp's instruction takes a pipe of its scheduler; processors execute 64 integer operations a
cycle, 16 of the special functions and 32 lanes of loads (CUDA C++ Programming Guide, arithmetic instructions)."""
DELAYS: Final = {"xu": 20, "memory": 28, "tensor": 33}
"""The cycles until a barrier is cleared that an instruction of a pipe sets; 6 for the others."""
OPERAND_CYCLES: Final = 12
CODE_BYTES: Final = 16
"""The bytes that each lane copies of codes; what it copies less of are scale words."""
ENDLESS: Final = math.inf
BYTES_OF: Final = {"128": 16, "64": 8}
"""The bytes that one lane loads, by the suffix of an opcode; 4 by default."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a prediction assumes of a GPU; `bytes_per_s` is what a copy reaches.

    Attributes:
        cache_bytes_per_s: The bandwidth of the last cache.
        memory_cycles: The delay of a load from memory that waits for no other.
        cache_cycles: The delay of one from the last cache.
        fma_cycles: The cycles between two warps' instructions of the floating-point pipe of a scheduler.
        tensor_cycles: The same for products of 16 x 8 x 16 with float32 sums.
    """

    name: str
    arch: int
    processors: int
    hertz: float
    bytes_per_s: float
    cache_bytes_per_s: float
    memory_cycles: int
    cache_cycles: int
    fma_cycles: float = 1
    tensor_cycles: float = 6.5

    def cycles_of(self, each: Instruction) -> float:
        """The cycles for which one warp's instruction takes its pipe."""
        if each.pipe == "fma":
            return self.fma_cycles
        if each.pipe == "tensor":  # of half the length, half as long
            return self.tensor_cycles / (1 if ".16816" in each.name else 2)
        return CYCLES[each.pipe] * (each.lane_bytes // 4 if each.name.startswith("LDS") else 1)


_H200: Final = Gpu("H200", 90, 132, 1.755e9, 4.3e12, 5.6e12, 480, 265)
GPUS: Final = (
    _H200,
    replace(_H200, name="H20", processors=78, hertz=1.98e9, bytes_per_s=3.6e12, cache_bytes_per_s=6.3e12),
    Gpu("B200", 100, 148, 1.85e9, 7.2e12, 11e12, 600, 300),
    Gpu("A100 80GB", 80, 108, 1.41e9, 1.8e12, 4.4e12, 466, 262, fma_cycles=2, tensor_cycles=8),
    Gpu("RTX 4090", 89, 128, 2.52e9, 0.92e12, 5e12, 541, 273, tensor_cycles=32),
)
"""Processors, clocks and nominal bandwidths of NVIDIA's data sheets; a copy is taken to reach .9 of the nominal one,
but for the H200's, which was measured. Delays: Luo et al., arXiv 2402.13499; the B200's is an assumption. The last
cache of an H100 was measured to reach .62 of 5,120 bytes a cycle (chipsandcheese.com, 2023), which is taken for all
but the RTX 4090. Products of mma.sync reach .62 of Hopper's peak (arXiv 2402.13499), taken for the B200 as well."""


@dataclass(frozen=True)
class Instruction:
    """One instruction with its control bits.

    Attributes:
        name: The opcode with its suffixes.
        stall: The cycles after which the warp's next instruction may be issued.
        sets: The barrier that its result clears, or `NO_BARRIER`.
        frees: The barrier that is cleared when its operands were read, or `NO_BARRIER`.
        waits: The barriers that must be clear before it is issued, a mask.
    """

    address: int
    text: str
    name: str
    stall: int
    sets: int
    frees: int
    waits: int

    @property
    def is_conditional(self) -> bool:
        """Whether it has a predicate."""
        return self.text.startswith("@")

    @cached_property
    def is_copy(self) -> bool:
        """Whether it copies from global to shared memory without waiting."""
        return self.name.startswith("LDGSTS")

    @property
    def target(self) -> int | None:
        """The address to which it jumps."""
        jump = re.search(r"\bBRA\S*\s.*?(?:`\(\S+\)|0x([0-9a-f]+))", self.text)
        return int(jump[1], 16) if jump and jump[1] else None

    @cached_property
    def pipe(self) -> str:
        """The pipe that executes it."""
        return next((pipe for pipe, names in PIPES.items() if self.name.startswith(names)), "alu")

    @cached_property
    def lane_bytes(self) -> int:
        """The bytes that a lane loads or stores."""
        return next((BYTES_OF[part] for part in self.name.split(".") if part in BYTES_OF), 4)


def instructions_of(code: str) -> list[Instruction]:
    """The instructions of a kernel in cuobjdump's listing."""
    found = []
    for match in ENCODED.finditer(code):
        text, control = match[2], int(match[4], 16) >> 41
        name = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]
        stall, sets, frees, waits = control & 15, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63
        found.append(Instruction(int(match[1], 16), text, name, max(1, stall), sets, frees, waits))
    return found


def path_of(program: list[Instruction], blocks: int) -> list[Instruction]:
    """The instructions that one warp executes, with the longest loop taken `blocks` times, of those with a product.

    Jumps and exits under a condition are taken where they skip a call, which are the slow paths of divisions, and
    otherwise not: they leave out work that a full batch has.
    """
    place = {instruction.address: index for index, instruction in enumerate(program)}
    loops = [
        (place[each.target], index)
        for index, each in enumerate(program)
        if each.target is not None and each.target < each.address and each.target in place
    ]
    with_products = [span for span in loops if any(each.pipe == "tensor" for each in program[span[0] : span[1] + 1])]
    start, end = max(with_products or loops, key=lambda span: span[1] - span[0], default=(0, -1))
    path, index = [], 0
    while index < len(program):
        each = program[index]
        path.append(each)
        if index == end:
            path += [inside for _ in range(blocks - 1) for inside in program[start : end + 1]]
        elif each.name.startswith("EXIT") and not each.is_conditional:
            break
        elif each.target is not None and each.target > each.address:
            skipped = program[index + 1 : place[each.target]]
            if not each.is_conditional or any(inside.name.startswith("CALL") for inside in skipped):
                index = place[each.target]
                continue
        index += 1
    return path


@dataclass(frozen=True, slots=True)
class Work:
    """What each warp of a kernel does.

    Attributes:
        path: What it executes.
        copied_bytes: The bytes of codes that it brings from memory.
    """

    path: list[Instruction]
    copied_bytes: float = 0.0

    @property
    def useful(self) -> float:
        """The share of what its copies of 16 bytes a lane could bring: others bring zeros, or what a tail lacks."""
        wide = sum(each.is_copy and each.lane_bytes == CODE_BYTES for each in self.path)
        return min(1.0, self.copied_bytes / (32 * CODE_BYTES * wide)) if wide else 0.0


class _Queues:
    """The parts of one processor of the bandwidths of memory and of the last cache, which its loads share."""

    def __init__(self, gpu: Gpu, useful: float) -> None:
        cycles = gpu.processors * gpu.hertz
        self._memory_rate, self._cache_rate = gpu.bytes_per_s / cycles, gpu.cache_bytes_per_s / cycles
        self._gpu, self._useful = gpu, useful
        self._memory = self._cache = 0.0

    def copy(self, cycle: float, lane_bytes: int) -> float:
        """The cycle in which a copy is done: of codes, or of scale words, each in a sector that all heads share."""
        is_code = lane_bytes == CODE_BYTES
        loaded = 32 * lane_bytes * (self._useful if is_code else 1)
        self._memory = max(self._memory, cycle) + loaded / self._memory_rate
        self._cache = max(self._cache, cycle) + (loaded if is_code else 32 * SECTOR_BYTES) / self._cache_rate
        return max(self._memory + self._gpu.memory_cycles, self._cache + self._gpu.cache_cycles)


@dataclass(slots=True)
class _Warp:
    """A warp on a scheduler: what it executes next, from when on, and when what is on its way to it is there."""

    scheduler: int
    at: int = 0
    free: float = 0.0
    copied: float = 0.0
    pending: list[list[float]] = field(default_factory=lambda: [[] for _ in range(6)])

    def ready(self, each: Instruction) -> float:
        """The cycle in which its next instruction may be issued, by stalls and barriers."""
        for barrier in range(6):
            if each.waits >> barrier & 1 and self.pending[barrier]:
                self.free = max(self.free, *self.pending[barrier])
                self.pending[barrier] = []
        if each.name == "DEPBAR.LE":
            barrier, left = (int(number, 16) for number in re.findall(r"\b(?:SB|0x)([0-9a-f]+)", each.text)[:2])
            waiting = sorted(self.pending[barrier])
            if len(waiting) > left:
                self.free = max(self.free, waiting[-1 - left])
                self.pending[barrier] = waiting[len(waiting) - left :]
        return self.free

    def issue(self, each: Instruction, cycle: float, gpu: Gpu, queues: _Queues) -> None:
        """Issue its next instruction, and note when its results are there."""
        done = cycle + DELAYS.get(each.pipe, 6)
        if each.is_copy:
            done = queues.copy(cycle, each.lane_bytes)
            self.copied = max(self.copied, done)
        elif each.name.startswith("LDG") and each.pipe == "memory":
            done = cycle + gpu.cache_cycles
        elif each.name == "LDGDEPBAR":
            self.pending[0].append(self.copied)
        if each.sets != NO_BARRIER:
            self.pending[each.sets].append(done)
        if each.frees != NO_BARRIER:
            self.pending[each.frees].append(cycle + OPERAND_CYCLES)
        self.free, self.at = cycle + each.stall, self.at + 1


def simulated_cycles(work: Work, gpu: Gpu, count: int, resident: int) -> float:
    """The cycles in which one processor executes so many warps, of which it holds `resident` at once."""
    queues = _Queues(gpu, work.useful)
    issued = [0.0] * SCHEDULERS
    pipes = [dict.fromkeys((*PIPES, "alu"), 0.0) for _ in range(SCHEDULERS)]
    started, last = min(count, resident), 0.0
    warps = [_Warp(index % SCHEDULERS) for index in range(started)]
    queue = [(0.0, index) for index in range(started)]
    while queue:
        since, index = heapq.heappop(queue)
        warp = warps[index]
        each, scheduler = work.path[warp.at], warp.scheduler
        cycle = max(warp.ready(each), issued[scheduler], pipes[scheduler][each.pipe])
        if cycle > since:  # another warp may be earlier
            heapq.heappush(queue, (cycle, index))
            continue
        issued[scheduler] = cycle + 1
        pipes[scheduler][each.pipe] = cycle + gpu.cycles_of(each)
        warp.issue(each, cycle, gpu, queues)
        last = max(last, warp.free)
        if warp.at == len(work.path):
            if started == count:
                continue
            started += 1
            warps[index] = _Warp(scheduler, free=warp.free)
        heapq.heappush(queue, (warps[index].free, index))
    return last


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that decode at once, all of one length."""

    num_requests: int
    length: int


@dataclass(frozen=True, slots=True)
class Grid:
    """The programs of the decode kernel for a load.

    Attributes:
        programs: Those that have tokens.
        blocks: The blocks of tokens of each.
        splits: The parts of a request, those without tokens among them.
    """

    settings: DecodeLaunch
    programs: int
    blocks: int
    splits: int

    @classmethod
    def of(cls, keys: KernelSide, values: KernelSide, gqa: int, gpu: Gpu, load: Load) -> Grid:
        """The grid as a server launches it."""
        device = Device(f"sm_{gpu.arch}", gpu.processors)
        settings = device.launch(keys, values, gqa)
        tiles = keys.num_heads * math.ceil(gqa / settings.tile)
        splits = device.splits(settings, load.num_requests, tiles)
        settings = device.for_batch(settings, load.num_requests, tiles)
        per_split = max(load.length, settings.min_split * splits) / splits
        blocks = math.ceil(per_split / settings.tokens)
        parts = math.ceil(load.length / (blocks * settings.tokens))
        return cls(settings, load.num_requests * tiles * parts, blocks, splits)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted of one layer's decode kernel.

    Attributes:
        seconds: The time of the kernel.
        share: The share of the bandwidth that a copy reaches.
        waits_for: What takes nine tenths of that time or more by itself.
    """

    seconds: float
    share: float
    waits_for: str


def decode_work(pair: PrecisionPair, shape: HeadShape, gpu: Gpu, load: Load) -> tuple[Work, Grid]:
    """What a warp of the decode kernel does, and its grid."""
    keys, values = sass.side_of(shape, pair.k_bits), sass.side_of(shape, pair.v_bits)
    grid = Grid.of(keys, values, shape.gqa, gpu, load)
    facts = {**launch.decode_facts(keys, values, shape.gqa, grid.settings), **sass.PLAIN}
    code = sass.disassembled(sass.compiled(decode.decode_split, facts, gpu.arch, **grid.settings.options))
    tokens = grid.blocks * grid.settings.tokens
    copied = tokens * shape.head_dim * (pair.k_bits + pair.v_bits) / 8 / grid.settings.warps
    return Work(path_of(instructions_of(code), grid.blocks), copied), grid


def predicted(pair: PrecisionPair, shape: HeadShape, gpu: Gpu, load: Load) -> Prediction:
    """Predict one layer's decode kernel."""
    work, grid = decode_work(pair, shape, gpu, load)
    warps = grid.settings.warps
    count, resident = warps * math.ceil(grid.programs / gpu.processors), warps * grid.settings.resident
    cycles = simulated_cycles(work, gpu, count, resident)
    waits_for = "memory"
    for changed, name in (
        (replace(gpu, bytes_per_s=ENDLESS, cache_bytes_per_s=ENDLESS, memory_cycles=0, cache_cycles=0), "instructions"),
        (replace(gpu, bytes_per_s=ENDLESS, cache_bytes_per_s=ENDLESS), "delays"),
        (replace(gpu, bytes_per_s=ENDLESS), "last cache"),
    ):
        if simulated_cycles(work, changed, count, resident) >= 0.9 * cycles:
            waits_for = name
            break
    per_token = sum(stored_bytes(shape, bits) for bits in (pair.k_bits, pair.v_bits))
    seconds = cycles / gpu.hertz
    share = load.num_requests * load.length * per_token / seconds / gpu.bytes_per_s
    return Prediction(seconds, share, waits_for)


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
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: what is interpreted cannot be compiled; unset it")
    load, rows = Load(args.batch, args.length), []
    for name, gpu in itertools.product(args.pairs, [gpu for gpu in GPUS if gpu.name in args.gpus]):
        found = predicted(PrecisionPair.parse(name), LLAMA, gpu, load)
        rows.append({"pair": name, "gpu": gpu.name, **asdict(found)})
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    cells = [
        [row["pair"], row["gpu"], f"{1e6 * row['seconds']:.1f}", f"{row['share']:.2f}", row["waits_for"]]
        for row in rows
    ]
    print("\n".join(Table(("pair", "GPU", "us a layer", "share", "waits for"), cells, left=(0, 1, 4)).lines()))


if __name__ == "__main__":
    main()
