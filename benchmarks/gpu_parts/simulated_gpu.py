"""One processor of a GPU, simulated instruction by instruction. Knows nothing of kernels: a warp's path is given.

Four schedulers issue an instruction a cycle each, of warps whose stalls and barriers allow it, to the pipes behind
them; all loads share two queues, of the processor's parts of the bandwidths of the last cache and of memory. Not
modelled: instruction caches, register banks, the order in which memory serves processors, other kernels.
"""

from __future__ import annotations

import heapq
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from gpu_parts.sass_listing import NO_BARRIER, PIPES
from gpu_parts.sectors import SECTOR_BYTES

if TYPE_CHECKING:
    from gpu_parts.sass_listing import Instruction

SCHEDULERS: Final = 4
"""The schedulers of a processor, each with warps and pipes of its own."""
CYCLES: Final = {"imad": 2, "alu": 2, "xu": 8, "memory": 4, "uniform": 1, "control": 1}
"""The cycles for which a warp's instruction takes a pipe of its scheduler; processors execute 64 integer operations a
cycle, 16 of the special functions and 32 lanes of loads (CUDA C++ Programming Guide, arithmetic instructions)."""
DELAYS: Final = {"xu": 20, "memory": 28, "tensor": 33}
"""The cycles until a barrier is cleared that an instruction of a pipe sets; 6 for the others."""
OPERAND_CYCLES: Final = 12
CODE_BYTES: Final = 16
"""The bytes that each lane copies of codes; what it copies less of are scale words."""
ENDLESS: Final = math.inf


@dataclass(frozen=True, slots=True)
class SimulatedGpu:
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


_H200: Final = SimulatedGpu("H200", 90, 132, 1.755e9, 4.3e12, 5.6e12, 480, 265)
GPUS: Final = (
    _H200,
    replace(_H200, name="H20", processors=78, hertz=1.98e9, bytes_per_s=3.6e12, cache_bytes_per_s=6.3e12),
    SimulatedGpu("B200", 100, 148, 1.85e9, 7.2e12, 11e12, 600, 300),
    SimulatedGpu("A100 80GB", 80, 108, 1.41e9, 1.8e12, 4.4e12, 466, 262, fma_cycles=2, tensor_cycles=8),
    SimulatedGpu("RTX 4090", 89, 128, 2.52e9, 0.92e12, 5e12, 541, 273, tensor_cycles=32),
)
"""Processors, clocks and nominal bandwidths of NVIDIA's data sheets; a copy is taken to reach .9 of the nominal one,
but for the H200's, which was measured. Delays: Luo et al., arXiv 2402.13499; the B200's is an assumption. The last
cache of an H100 was measured to reach .62 of 5,120 bytes a cycle (chipsandcheese.com, 2023), which is taken for all
but the RTX 4090. Products of mma.sync reach .62 of Hopper's peak (arXiv 2402.13499), taken for the B200 as well."""


@dataclass(frozen=True, slots=True)
class WarpWork:
    """The work of each warp of a kernel.

    Attributes:
        path: The instructions that it executes.
        copied_bytes: The bytes of codes that it brings from memory.
    """

    path: list[Instruction]
    copied_bytes: float = 0.0

    @property
    def useful(self) -> float:
        """The share of what its copies of 16 bytes a lane could bring: others bring zeros, or what a tail lacks."""
        wide = sum(each.is_copy and each.lane_bytes == CODE_BYTES for each in self.path)
        return min(1.0, self.copied_bytes / (32 * CODE_BYTES * wide)) if wide else 0.0

    @property
    def cache_bytes(self) -> float:
        """The bytes that its loads and copies bring from the last cache."""
        copied = sum(copied_bytes(each.lane_bytes, self.useful)[1] for each in self.path if each.is_copy)
        return copied + sum(32 * each.lane_bytes for each in self.path if each.is_load)


def copied_bytes(lane_bytes: int, useful: float) -> tuple[float, float]:
    """The bytes of a warp's copy from memory and from the last cache: all heads share a sector of scale words."""
    if lane_bytes == CODE_BYTES:
        return 32 * lane_bytes * useful, 32 * lane_bytes * useful
    return 32 * lane_bytes, 32 * SECTOR_BYTES


class _Queues:
    """The parts of one processor of the bandwidths of memory and of the last cache, which its loads share."""

    def __init__(self, gpu: SimulatedGpu, useful: float) -> None:
        cycles = gpu.processors * gpu.hertz
        self._memory_rate, self._cache_rate = gpu.bytes_per_s / cycles, gpu.cache_bytes_per_s / cycles
        self._gpu, self._useful = gpu, useful
        self._memory = self._cache = 0.0

    def copy(self, cycle: float, lane_bytes: int) -> float:
        """The cycle in which a copy is done, of codes or of scale words."""
        from_memory, from_cache = copied_bytes(lane_bytes, self._useful)
        self._memory = max(self._memory, cycle) + from_memory / self._memory_rate
        return max(self._memory + self._gpu.memory_cycles, self.load(cycle, from_cache))

    def load(self, cycle: float, num_bytes: float) -> float:
        """The cycle in which bytes are there that the last cache holds: slots, queries, what kernels leave there."""
        self._cache = max(self._cache, cycle) + num_bytes / self._cache_rate
        return self._cache + self._gpu.cache_cycles


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

    def issue(self, each: Instruction, cycle: float, gpu: SimulatedGpu, queues: _Queues) -> None:
        """Issue its next instruction, and note when its results are there."""
        done = cycle + DELAYS.get(each.pipe, 6)
        if each.is_copy:
            done = queues.copy(cycle, each.lane_bytes)
            self.copied = max(self.copied, done)
        elif each.is_load:
            done = queues.load(cycle, 32 * each.lane_bytes)
        elif each.name == "LDGDEPBAR":
            self.pending[0].append(self.copied)
        if each.sets != NO_BARRIER:
            self.pending[each.sets].append(done)
        if each.frees != NO_BARRIER:
            self.pending[each.frees].append(cycle + OPERAND_CYCLES)
        self.free, self.at = cycle + each.stall, self.at + 1


def simulated_cycles(work: WarpWork, gpu: SimulatedGpu, count: int, resident: int) -> float:
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
