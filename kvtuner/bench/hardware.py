"""The machine of a server: how fast it reads a model's weights, and how much of it is in use under load.

A token of one request cannot come faster than the weights are read.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.benchmark import Timer

from kvtuner.bench.expert_share import reached_elements

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

MIN_BUFFER_BYTES: Final = 1 << 20
MAX_BUFFER_BYTES: Final = 4 << 30
MEASURE_S: Final = 2.0
READS_AT_ONCE: Final = 4  # a GPU would mostly wait for a single one to be launched
TIMEOUT_S: Final = 300
DTYPE_BYTES: Final = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
QUANTIZED_BYTES: Final = 0.5
"""The least that a weight of a quantized checkpoint takes."""
SAMPLE_PERIOD_S: Final = 0.5
MEMORY: Final = "host_memory_bytes"
GPU_MEMORY: Final = "gpu_memory_bytes"
GPU_BUSY: Final = "gpu_utilization"
GPU_MEMORY_BUSY: Final = "gpu_memory_utilization"
"""Share of the time in which the GPU's memory was read or written, as NVML says."""


def read_bandwidth(num_bytes: int, device: str) -> float:
    """Measure the most bytes per second that a device reads of a buffer, caches included, as a server's steps do.

    On a processor one core is measured too, times the cores: with little to read, cores mostly wait for each other.
    """
    size = min(max(num_bytes, MIN_BUFFER_BYTES), MAX_BUFFER_BYTES) // 4
    buffer = torch.ones(size, dtype=torch.float32, device=device)
    if buffer.is_cuda:
        torch.cuda.set_device(buffer.device)  # the timer waits for this one
        return _bytes_per_s(buffer, 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(_bytes_per_s(buffer, cores), _bytes_per_s(buffer, 1) * cores)


def _bytes_per_s(buffer: torch.Tensor, num_threads: int) -> float:
    timer = Timer("buffer.sum()", globals={"buffer": buffer}, num_threads=num_threads)
    deadline = time.perf_counter() + MEASURE_S
    quickest = timer.timeit(READS_AT_ONCE).mean
    while time.perf_counter() < deadline:
        quickest = min(quickest, timer.timeit(READS_AT_ONCE).mean)
    return buffer.nbytes / quickest


def read_bandwidth_in_subprocess(num_bytes: int, device: str) -> float | None:
    """`read_bandwidth` in a process of its own, which leaves no memory behind on the device; None if it fails."""
    program = f"from kvtuner.bench.hardware import read_bandwidth as read; print(read({num_bytes}, {device!r}))"
    # Servers use all cores, whatever limit this program was started under.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", program]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=environment)
        return float(child.stdout)
    except (subprocess.SubprocessError, ValueError):
        return None


def weight_bytes(config: Any, served: Mapping[str, Any], *, trust_remote_code: bool = False) -> int | None:
    """The bytes of weights that a generated token reads at least, of all ranks together; None where it is not known.

    Embeddings that are only looked up are left out, those of positions too, and experts that a token does not reach.
    `served` has the server's own dtype and quantization of weights.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):  # shapes alone, no memory
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, ImportError, AttributeError, TypeError):  # a model that SGLang builds and transformers does not
        return None
    looked_up = _looked_up(model)
    shapes = {name: weight.shape for name, weight in model.named_parameters() if id(weight) not in looked_up}
    elements = reached_elements(config.get_text_config(), shapes)
    if elements is None:
        return None
    is_quantized = served.get("quantization") or getattr(config, "quantization_config", None)
    dtype_bytes = DTYPE_BYTES.get(str(served.get("dtype")), DTYPE_BYTES["bfloat16"])
    return int(float(elements) * (QUANTIZED_BYTES if is_quantized else dtype_bytes))


def _looked_up(model: Any) -> set[int]:
    """The ids of embedding weights, except one that the output layer is tied to: that is read whole."""
    embeddings = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    tables = [model.get_input_embeddings(), *embeddings]
    head = model.get_output_embeddings()
    return {id(table.weight) for table in tables if head is None or table.weight is not head.weight}


def summary_of(samples: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The usage of several samples together: the most of bytes, the mean of shares."""
    values = defaultdict(list)
    for sample in samples:
        for name, value in sample.items():
            values[name].append(value)
    return {name: max(v) if name.endswith("_bytes") else float(np.mean(v)) for name, v in sorted(values.items())}


class Observer:
    """Watches the process of a server that was started here with its children, and the GPUs that it uses.

    Where NVML does not know its processes, these are so many GPUs with the most memory in use.
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
            while not done.wait(SAMPLE_PERIOD_S):
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
        return {MEMORY: float(sum(resident.values())), **self._gpu_usage(resident)}

    def _resident_bytes(self) -> dict[int, int]:
        import psutil

        resident = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._pid)
            for member in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    resident[member.pid] = member.memory_info().rss
        return resident

    def _gpu_usage(self, pids: Collection[int]) -> dict[str, float]:
        """The GPUs that its processes compute on; the fullest ones where a container hides the processes' numbers."""
        nvml = self._nvml
        if nvml is None:
            return {}
        try:
            used_bytes = [nvml.nvmlDeviceGetMemoryInfo(gpu).used for gpu in self._gpus]
            rates = [nvml.nvmlDeviceGetUtilizationRates(gpu) for gpu in self._gpus]
            processes = [nvml.nvmlDeviceGetComputeRunningProcesses(gpu) for gpu in self._gpus]
        except nvml.NVMLError:  # what some drivers do not tell
            return {}
        fullest = sorted(range(len(self._gpus)), key=used_bytes.__getitem__, reverse=True)
        in_use = [gpu for gpu in fullest if any(process.pid in pids for process in processes[gpu])]
        if not (in_use := in_use or fullest[: self._num_gpus]):
            return {}
        return {
            GPU_MEMORY: float(sum(used_bytes[gpu] for gpu in in_use)),
            GPU_BUSY: float(np.mean([rates[gpu].gpu for gpu in in_use])) / 100,
            GPU_MEMORY_BUSY: float(np.mean([rates[gpu].memory for gpu in in_use])) / 100,
        }


def _nvml_and_gpus() -> tuple[Any, list[Any]]:
    try:
        import pynvml  # nvidia-ml-py, which comes with SGLang on GPUs
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None, []
