"""The GPUs that a plan knows by name. Knows nothing of models or servers."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvtuner.errors import OptionError


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        name: The name as vendors write it.
        memory_mib: MiB of its memory, as memory.total of ``nvidia-smi`` prints them.
        tflops: 10^12 operations per second of dense matrices of 16 bits with sums of 32 bits, of the SXM module where
            there are several. Those of A100, L40S and B200 were compared with published tables, the others were not.
    """

    name: str
    memory_mib: int
    tflops: float


GPUS: Final = (
    Gpu("T4", 15360, 65),  # of fp16: it has no bf16
    Gpu("L4", 23034, 121),
    Gpu("A10G", 23028, 70),
    Gpu("RTX 3090", 24576, 71),
    Gpu("RTX 4090", 24564, 165),
    Gpu("RTX 5090", 32607, 209),
    Gpu("A100-40GB", 40960, 312),
    Gpu("L40S", 46068, 362),
    Gpu("RTX 6000 Ada", 49140, 364),
    Gpu("A100-80GB", 81920, 312),
    Gpu("H100", 81559, 989),
    Gpu("H20", 97871, 148),
    Gpu("RTX PRO 6000", 97887, 503),
    Gpu("H200", 143771, 989),
    Gpu("B200", 183359, 2250),
)


def find_gpu(name: str) -> Gpu:
    """The GPU of a name, whatever its case, spaces and hyphens; an `OptionError` names those that are known."""
    for gpu in GPUS:
        if _plain(gpu.name) == _plain(name):
            return gpu
    known = ", ".join(gpu.name for gpu in GPUS)
    raise OptionError(f"knows no GPU {name!r}, only {known}; give another's memory instead: --memory 80GiB")


def gpu_name(text: str) -> str:
    """The name of a known GPU as the table writes it."""
    return find_gpu(text).name


def _plain(name: str) -> str:
    return name.casefold().replace(" ", "").replace("-", "")
