"""The instruction sets that libraries are compiled for, and those that a processor runs. Knows no compiler."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What a library is compiled for.

    Attributes:
        name: Its name, which begins the library's.
        compiler_flags: What the compiler is told.
        machines: The machines, as `platform.machine` names them, that have it; empty for every one.
        needs: The flags of /proc/cpuinfo that a processor must have.
        has_integer_products: Whether products of integers are faster there than those of float32.
    """

    name: str
    compiler_flags: tuple[str, ...]
    machines: tuple[str, ...]
    needs: frozenset[str]
    has_integer_products: bool


_X86: Final = ("x86_64", "AMD64")
_V3: Final = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_V4: Final = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
_TILES: Final = frozenset({"amx_tile", "amx_int8"})
_ARCH_PRCTL: Final = 158
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18
INSTRUCTION_SETS: Final = (
    InstructionSet(
        "amx",
        ("-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-int8"),
        _X86,
        _V4 | _TILES,
        has_integer_products=True,
    ),
    InstructionSet("avx512", ("-march=x86-64-v4", "-mavx512vnni"), _X86, _V4, has_integer_products=True),
    InstructionSet("avx2", ("-march=x86-64-v3",), _X86, _V3, has_integer_products=True),
    InstructionSet("neon", ("-DKVTUNER_NEON",), ("aarch64",), frozenset(), has_integer_products=True),
    InstructionSet("generic", (), (), frozenset(), has_integer_products=False),
)
"""The instruction sets, the best first. Any processor runs the last: the same source, four numbers at a time."""


def sets_of_machine(machine: str) -> tuple[InstructionSet, ...]:
    """The instruction sets that processors of a kind of machine may take, the best first; the last has no needs."""
    kinds = [kind for kind in INSTRUCTION_SETS if not kind.machines or machine in kind.machines]
    last = next(index for index, kind in enumerate(kinds) if not kind.needs)
    return tuple(kinds[: last + 1])


@cache
def runnable_sets() -> tuple[InstructionSet, ...]:
    """The instruction sets that this processor runs, the best first.

    Linux gives a process the registers of tiles (AMX) where it asks for them, which is done here.
    """
    machine, flags = platform.machine(), _processor_flags()
    if flags >= _TILES and not _may_use_tiles():
        flags -= _TILES
    kinds = [kind for kind in INSTRUCTION_SETS if not kind.machines or machine in kind.machines]
    return tuple(kind for kind in kinds if kind.needs <= flags)


def _may_use_tiles() -> bool:
    """Whether the kernel lets this process use tiles; one older than Linux 5.16 does not."""
    asked: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return asked == 0


def _processor_flags() -> set[str]:
    """The flags of /proc/cpuinfo; none where it has no such line, or is not there."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return set(value.split())
    return set()
