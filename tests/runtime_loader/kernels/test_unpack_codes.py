"""The row's law inside kernels is the one of `precision.py`; their assembly, run on Python's integers, keeps it."""

from __future__ import annotations

import inspect
import itertools
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest

from kvtuner.precision import PACKED_BITS, WORD_BITS, num_slots, words_offset
from kvtuner.runtime_loader.kernels import unpack_codes
from kvtuner.runtime_loader.kernels.unpack_codes import HIGH_THIRD, LOW_THIRD, factor_of, slots_of, words_at


def permuted(a: int, b: int, selector: int) -> int:
    """PTX's prmt: each nibble of the selector takes one of eight bytes."""
    eight = (b << 32 | a).to_bytes(8, "little")
    return int.from_bytes(bytes(eight[selector >> 4 * place & 7] for place in range(4)), "little")


def looked_up(a: int, b: int, c: int, table: int) -> int:
    """PTX's lop3: a bit of the table for every three bits."""
    return sum((table >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1) & 1) << n for n in range(32))


OPERATIONS: dict[str, Any] = {
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": permuted,
    "lop3.b32": looked_up,
}


def assembled(text: str, _: str, arguments: list[int], **__: Any) -> int:
    """The result of a piece of assembly on registers of 32 bits."""
    registers = {f"${number}": value for number, value in enumerate(arguments, start=1)}
    for line in filter(None, map(str.strip, re.sub(r"[{}]", "", text).split(";"))):
        name, _, operands = line.partition(" ")
        if name != ".reg":
            target, *sources = operands.replace(" ", "").split(",")
            values = [registers[source] if source in registers else int(source, 0) for source in sources]
            registers[target] = OPERATIONS[name](*values)
    return registers["$0"]


def codes_of(*arguments: Any) -> tuple[int, ...]:
    """The kernels' own source, as Python, of which each register holds two units."""
    language = SimpleNamespace(inline_asm_elementwise=assembled, constexpr=int, float16=None, int16=None)
    names: dict[str, Any] = {"tl": language}
    for function in ("_mask_of", "_codes", "_high_bytes", "_joining", "_upper_bytes", "codes_of"):
        source = inspect.getsource(getattr(unpack_codes, function).fn)
        exec(source.partition("\n")[2], names)
    return tuple(names["codes_of"](slot, *arguments) for slot in range(slots_of(arguments[2])))


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_kernels_find_slots_and_words_where_rows_have_them(bits: int) -> None:
    assert slots_of(bits) == num_slots(bits)
    for heads, head_dim in itertools.product((1, 2, 3, 8), (16, 64, 80, 96, 128, 256)):
        for word_bits in WORD_BITS[: 1 if bits == 8 else 2]:
            place = words_at(heads, head_dim // num_slots(bits), bits, word_bits)
            assert word_bits // 8 * place == words_offset(heads, head_dim, bits, word_bits)


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_every_code_is_an_fp16_without_an_exponent(bits: int) -> None:
    """Only then is it a number times its code; from 1,024 on the bits are an exponent's."""
    assert all((2**bits - 1) * factor_of(slot, bits) < 1024 for slot in range(num_slots(bits)))


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_assembly_unpacks_the_codes_of_two_units(bits: int) -> None:
    rng = random.Random(bits)
    for _ in range(50):
        codes = [[rng.randrange(2**bits) for _ in range(slots_of(bits))] for _ in range(2)]
        units = [sum(code << slot * bits for slot, code in enumerate(of_unit)) for of_unit in codes]
        others = [rng.randrange(256), rng.randrange(256)]  # the other bytes of halfwords of third bytes
        for half, selector in enumerate((LOW_THIRD.value, HIGH_THIRD.value)):
            thirds = sum(
                ((unit >> 16) << 8 * half | other << 8 * (1 - half)) << 16 * place
                for place, (unit, other) in enumerate(zip(units, others, strict=True))
            )
            apart = [thirds, 0] if half == 0 else [0, thirds]
            for loaded in ((*apart, False), (thirds, selector << 16 | selector, True)):
                found = codes_of((units[1] & 0xFFFF) << 16 | units[0] & 0xFFFF, loaded, bits, True)
                for slot, register in enumerate(found):
                    for place in (0, 1):
                        assert register >> 16 * place & 0xFFFF == codes[place][slot] * factor_of(slot, bits)
