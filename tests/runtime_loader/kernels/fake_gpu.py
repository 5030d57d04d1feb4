"""A GPU that is not there, for Triton: kernels are compiled for its architecture and launched on a driver that checks.

What a launch passes is compared with what the kernel was compiled for: types, alignment, shared memory, grid, and that
codes and scales are read and written at addresses that are known to be multiples of 16. Nothing is computed.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

SHARED_KIB: Final = {80: 163, 89: 99, 90: 227, 100: 227}
"""The shared memory that a program may have (CUDA C++ Programming Guide, technical specifications)."""
MOST_GRID: Final = (2**31 - 1, 65535, 65535)
PROCESSORS: Final = {80: 108, 89: 142, 90: 132, 100: 148}
POINTED: Final = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int16: "*i16",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
INTEGERS: Final = {"i32": 31, "i64": 63, "u32": 32, "u64": 64, "i8": 7, "i16": 15}
ALIGNED: Final = ("rows_ptr", "words_ptr", "device_ptr", "host_ptr")
"""The ends of names of pointers that are read or written in long pieces."""


class LaunchError(AssertionError):
    """A launch that a GPU would refuse, or do wrongly or slowly."""


@dataclass
class Launched:
    """What was launched: how often each kernel, and the kernels that were compiled."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    compiled: collections.Counter[str] = field(default_factory=collections.Counter)


LAUNCHED: Final = Launched()


class FakeUtils:
    """What Triton's driver does with binaries."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_KIB[self.arch] << 10, "warpSize": 32, "max_num_regs": 65536,
            "multiprocessor_count": PROCESSORS[self.arch], "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1,
        }  # fmt: skip

    def load_binary(self, name: str, binary: bytes, shared: int, _: int) -> tuple[Any, ...]:
        if not binary or binary[:4] != b"\x7fELF":
            raise LaunchError(f"{name} is no machine code")
        if shared > SHARED_KIB[self.arch] << 10:
            raise LaunchError(f"{name} takes {shared} bytes of shared memory on sm_{self.arch}")
        LAUNCHED.compiled[name] += 1
        return object(), object(), 0, 0, 1024


class FakeLauncher:
    """A launch of one compiled kernel."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.name, self.signature, self.warps = src.fn.fn.__name__, src.signature, metadata.num_warps
        names = list(self.signature)
        self.divisible = {
            names[path[0]]
            for path, attributes in src.attrs.items()
            if len(path) == 1 and ["tt.divisibility", 16] in [list(each) for each in attributes]
        }

    def __call__(self, *arguments: Any) -> None:
        # Grid, stream, function, packed metadata, launch metadata, two hooks; then the kernel's arguments.
        grid, values = arguments[:3], arguments[len(arguments) - len(self.signature) :]
        if any(not 0 < size <= most for size, most in zip(grid, MOST_GRID, strict=True)):
            raise LaunchError(f"{self.name} has a grid of {grid}")
        for (name, kind), value in zip(self.signature.items(), values, strict=True):
            self._check(name, kind, value)
        LAUNCHED.counts[self.name] += 1

    def _check(self, name: str, kind: Any, value: Any) -> None:
        if kind == "constexpr":
            return
        number = value
        if isinstance(value, torch.Tensor):
            if POINTED.get(value.dtype) != kind:
                raise LaunchError(f"{self.name} takes {name} as {kind}, not {value.dtype}")
            number = value.data_ptr()
            if name.endswith(ALIGNED) and (number % 16 or name not in self.divisible):
                raise LaunchError(f"{self.name} is not compiled for {name} at a multiple of 16")
        elif kind in INTEGERS:
            if not isinstance(value, int) or not -(2 ** INTEGERS[kind]) <= value < 2 ** INTEGERS[kind]:
                raise LaunchError(f"{self.name} takes {name} as {kind}, not {value!r}")
        elif kind in ("fp32", "fp64"):
            if not isinstance(value, float):
                raise LaunchError(f"{self.name} takes {name} as {kind}, not {value!r}")
        else:
            raise LaunchError(f"{self.name} takes {name} as {kind}, which nobody passes as {value!r}")
        if name in self.divisible and number % 16:
            raise LaunchError(f"{self.name} is compiled for {name} in multiples of 16, not {number}")


class FakeDriver(DriverBase):
    """A driver with one device, whose number is its compute capability."""

    def __init__(self, arch: int) -> None:
        self.arch, self.utils, self.launcher_cls = arch, FakeUtils(arch), FakeLauncher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is timed here")

    def get_current_device(self) -> int:
        return self.arch

    def set_current_device(self, _: int) -> None:
        """Keep the one device."""

    def get_current_stream(self, _: int) -> int:
        return 0


def use(arch: int) -> None:
    """Make Triton compile for a compute capability, and launch here."""
    triton.runtime.driver.set_active(FakeDriver(arch))
