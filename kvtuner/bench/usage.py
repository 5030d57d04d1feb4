"""The usage of the machine while a server is under load: the memory of its processes, and its GPUs."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PERIOD_S: Final = 0.5
MEMORY: Final = "host_memory_bytes"
GPU_MEMORY: Final = "gpu_memory_bytes"
GPU_BUSY: Final = "gpu_utilization"
GPU_MEMORY_BUSY: Final = "gpu_memory_utilization"
"""Share of the time in which the GPU's memory was read or written, as NVML says."""


def summary_of(samples: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The usage of several samples together: the most of bytes, the mean of shares."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.items():
            values.setdefault(name, []).append(value)
    return {name: max(v) if name.endswith("_bytes") else float(np.mean(v)) for name, v in sorted(values.items())}


class Observer:
    """Watches a process with its children, and GPUs.

    Args:
        pid: The process of the server that was started here.
        num_gpus: The number of GPUs that it uses: those with the most memory in use where NVML does not know its
            processes.
    """

    def __init__(self, pid: int, num_gpus: int) -> None:
        self._pid, self._num_gpus = pid, num_gpus
        self._nvml, self._gpus = _nvml_and_gpus()

    @contextlib.contextmanager
    def watching(self) -> Iterator[dict[str, float]]:
        """Watch while the block runs; the mapping is filled when it ends."""
        samples = [self._sample()]
        done = threading.Event()

        def take_samples() -> None:
            while not done.wait(PERIOD_S):
                samples.append(self._sample())

        thread = threading.Thread(target=take_samples, daemon=True)
        thread.start()
        usage: dict[str, float] = {}
        try:
            yield usage
        finally:
            done.set()
            thread.join()
            usage.update(summary_of([*samples, self._sample()]))

    def _sample(self) -> dict[str, float]:
        resident = self._resident_bytes()
        return {MEMORY: float(sum(resident.values())), **self._gpu_usage(resident.keys())}

    def _resident_bytes(self) -> dict[int, int]:
        """The resident bytes by process; those that just ended have none."""
        import psutil

        resident = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._pid)
            for member in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    resident[member.pid] = member.memory_info().rss
        return resident

    def _gpu_usage(self, pids: Iterable[int]) -> dict[str, float]:
        """The GPUs that its processes compute on; the fullest ones where a container hides the processes' numbers."""
        if self._nvml is None:
            return {}
        try:
            gpus = [_gpu_sample(self._nvml, handle) for handle in self._gpus]
        except self._nvml.NVMLError:  # what some drivers do not tell
            return {}
        in_use = [gpu for gpu in gpus if gpu.pids.intersection(pids)]
        in_use = in_use or sorted(gpus, key=lambda gpu: gpu.used_bytes, reverse=True)[: self._num_gpus]
        if not in_use:
            return {}
        return {
            GPU_MEMORY: float(sum(gpu.used_bytes for gpu in in_use)),
            GPU_BUSY: sum(gpu.busy for gpu in in_use) / len(in_use),
            GPU_MEMORY_BUSY: sum(gpu.memory_busy for gpu in in_use) / len(in_use),
        }


class _GpuSample(NamedTuple):
    used_bytes: int
    busy: float
    memory_busy: float
    pids: set[int]


def _gpu_sample(nvml: Any, gpu: Any) -> _GpuSample:
    rates = nvml.nvmlDeviceGetUtilizationRates(gpu)
    pids = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    return _GpuSample(nvml.nvmlDeviceGetMemoryInfo(gpu).used, rates.gpu / 100, rates.memory / 100, pids)


def _nvml_and_gpus() -> tuple[Any, list[Any]]:
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
