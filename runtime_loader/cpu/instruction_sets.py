"""The instruction sets that libraries are compiled for, and those that a processor runs. Knows no compiler."""

from __future__ import annotations

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
INSTRUCTION_SETS: Final = (
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
    """The instruction sets that this processor runs, the best first."""
    machine, flags = platform.machine(), _processor_flags()
    kinds = [kind for kind in INSTRUCTION_SETS if not kind.machines or machine in kind.machines]
    return tuple(kind for kind in kinds if kind.needs <= flags)


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
