"""The device of the benchmark: its name, its copy bandwidth, and the time that a function takes on it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import platform
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REPLAYS: Final = 30
FEWEST_REPLAYS: Final = 5
REPLAYED_S: Final = 0.6
"""The seconds for which a graph is replayed, at most `REPLAYS` times and at least `FEWEST_REPLAYS`."""
WARM_UP: Final = 5
COPIED_BYTES: Final = 2 << 30


@dataclass(frozen=True)
class Machine:
    """A GPU, or a processor with Triton's interpreter for a smoke test; the dtype of queries and of rows at 16 bits."""

    device: torch.device
    dtype: torch.dtype

    @property
    def smoke(self) -> bool:
        """Whether this is a smoke test, whose times mean nothing."""
        return self.device.type == "cpu"

    @property
    def name(self) -> str:
        """The name of the results' folder."""
        name = "smoke" if self.smoke else torch.cuda.get_device_name(self.device)
        return name.replace("NVIDIA ", "").replace(" ", "-")

    @property
    def l2_bytes(self) -> int:
        """The bytes of the last cache."""
        return 1 << 10 if self.smoke else int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    @property
    def free_bytes(self) -> int:
        """The bytes that may still be allocated."""
        if self.smoke:
            return 1 << 20
        self.give_back()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def give_back(self) -> None:
        """Give back to other processes what torch keeps for later."""
        if not self.smoke:
            torch.cuda.empty_cache()

    def facts(self) -> dict[str, Any]:
        """Versions and sizes, for the record."""
        facts: dict[str, Any] = {"device": self.name, "python": platform.python_version()}
        for package in ("torch", "triton", "sglang"):
            facts[package] = None
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                facts[package] = importlib.metadata.version(package)
        facts["cuda"] = torch.version.cuda
        if not self.smoke:
            properties = torch.cuda.get_device_properties(self.device)
            facts |= {
                "arch": f"sm_{properties.major}{properties.minor}", "processors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory, "l2_bytes": self.l2_bytes,
            }  # fmt: skip
        return facts

    def seconds(self, runs: Sequence[Callable[[], object]]) -> float:
        """The median seconds of one of several runs, one after the other in a CUDA graph.

        The runs should read different rows, in all more than the last cache holds.
        """
        if self.smoke:
            start = time.perf_counter()
            for run in runs:
                run()
            return (time.perf_counter() - start) / len(runs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for run in runs[:2]:  # compiles, outside of the graph
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for run in runs:
                run()
        graph.replay()
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        replays = replays_of(time.perf_counter() - start)
        for _ in range(min(WARM_UP, replays)):
            graph.replay()
        # Replays wait in a queue, so that none begins with the time that its launch takes.
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        events[-1].synchronize()
        times: list[float] = [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(events)]
        del graph
        return statistics.median(times) / len(runs)

    def copy_bytes_per_s(self) -> float:
        """Bytes read plus bytes written by a large copy, by the driver or by a kernel, whichever is faster.

        In a graph the driver's copy reached 2.8 TB/s on an H200, where kernels read 4.4.
        """
        size = 1 << 16 if self.smoke else COPIED_BYTES
        source, target = (torch.empty(size // 8, dtype=torch.int64, device=self.device) for _ in range(2))
        source.random_()
        copies = (lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target))
        return max(2 * size / self.seconds([copy]) for copy in copies)


def replays_of(seconds: float) -> int:
    """The number of times that a graph is replayed which takes so long."""
    return min(REPLAYS, max(FEWEST_REPLAYS, int(REPLAYED_S / seconds)))
