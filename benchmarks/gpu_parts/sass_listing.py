"""Machine code as cuobjdump lists it, with the control bits of each instruction, and the path that a warp takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

NO_BARRIER: Final = 7
"""The number of a barrier that stands for none."""
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
BYTES_OF: Final = {"128": 16, "64": 8}
"""The bytes that one lane loads, by the suffix of an opcode; 4 by default."""


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

    @cached_property
    def is_load(self) -> bool:
        """Whether it loads from global memory into registers."""
        return self.name.startswith("LDG") and not self.is_copy and self.pipe == "memory"

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

    Jumps under a condition are taken where they skip a call, as the slow paths of divisions are, or an exit of those
    without work. Other conditions are taken as not met.
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
            leaves = any(inside.name == "EXIT" and not inside.is_conditional for inside in skipped)
            if leaves or not each.is_conditional or any(inside.name.startswith("CALL") for inside in skipped):
                index = place[each.target]
                continue
        index += 1
    return path
