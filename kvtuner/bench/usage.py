"""The usage of the machine while a server is under load: the memory of its processes, and its GPUs."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

PERIOD_S: Final = 0.5
MEMORY: Final = "host_memory_bytes"
GPU_MEMORY: Final = "gpu_memory_bytes"
GPU_BUSY: Final = "gpu_utilization"
GPU_MEMORY_BUSY: Final = "gpu_memory_utilization"
"""Share of the time in which the GPU's memory was read or written, as NVML says."""


class Observer:
    """Watches a process with its children, and GPUs.

    Args:
        pid: The process of the server that was started here.
        num_gpus: The number of GPUs that it uses: those with the most memory in use where NVML does not know its
            processes.
    """

    def __init__(self, pid: int, num_gpus: int) -> None:
        self._pid, self._num_gpus = pid, num_gpus
        self._nvml, self._gpus = _gpus()

    @contextlib.contextmanager
    def watching(self) -> Iterator[dict[str, float]]:
        """Watch while the block runs; the mapping is filled when it ends: the most of bytes, the mean of shares."""
        samples: list[dict[str, float]] = [self._look()]
        done = threading.Event()

        def look_on() -> None:
            while not done.wait(PERIOD_S):
                samples.append(self._look())

        thread = threading.Thread(target=look_on, daemon=True)
        thread.start()
        usage: dict[str, float] = {}
        try:
            yield usage
        finally:
            done.set()
            thread.join()
            samples.append(self._look())
            for name in sorted({name for sample in samples for name in sample}):
                values = [sample[name] for sample in samples if name in sample]
                usage[name] = max(values) if name.endswith("_bytes") else sum(values) / len(values)

    def _look(self) -> dict[str, float]:
        family = self._family()
        return {MEMORY: float(sum(family.values())), **self._of_gpus(frozenset(family))}

    def _of_gpus(self, family: frozenset[int]) -> dict[str, float]:
        """The GPUs that its processes compute on; the fullest ones where a container hides the processes' numbers."""
        if self._nvml is None:
            return {}
        try:
            gpus = [_of_gpu(self._nvml, handle) for handle in self._gpus]
        except self._nvml.NVMLError:  # what some drivers do not tell
            return {}
        ours = [gpu for gpu in gpus if gpu.pids & family]
        in_use = ours or sorted(gpus, key=lambda gpu: gpu.used_bytes, reverse=True)[: self._num_gpus]
        if not in_use:
            return {}
        return {
            GPU_MEMORY: float(sum(gpu.used_bytes for gpu in in_use)),
            GPU_BUSY: sum(gpu.busy for gpu in in_use) / len(in_use),
            GPU_MEMORY_BUSY: sum(gpu.memory_busy for gpu in in_use) / len(in_use),
        }

    def _family(self) -> dict[int, int]:
        """The resident bytes by process; those that just ended have none."""
        import psutil

        resident = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._pid)
            for member in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    resident[member.pid] = member.memory_info().rss
        return resident


@dataclass(frozen=True, slots=True)
class _Gpu:
    """A GPU in NVML: the bytes in use by anybody, shares of time, processes that compute on it."""

    used_bytes: int
    busy: float
    memory_busy: float
    pids: frozenset[int]


def _of_gpu(nvml: Any, handle: Any) -> _Gpu:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    pids = frozenset(each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return _Gpu(nvml.nvmlDeviceGetMemoryInfo(handle).used, rates.gpu / 100, rates.memory / 100, pids)


def _gpus() -> tuple[Any, list[Any]]:
    """NVML and a handle for each GPU; None and no handles where there is no driver."""
    try:
        import pynvml  # nvidia-ml-py, which comes with SGLang on GPUs
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None, []
