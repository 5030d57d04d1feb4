"""Codes of halfword-sliced units as numbers a tensor core takes, without an integer-to-float conversion.

A code's bits below those of 1024 in fp16 are 1024 + factor * code, exactly: the factor is 1 where the code lies in the
lowest bits and grows with the place where it was found, which saves the shift. Whoever multiplies subtracts the 1024
and divides by the factor.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

OFFSET: Final = tl.constexpr(1024.0)


@triton.constexpr_function
def factor_of(slot, bits):
    """By how much the codes of a slot are too large."""
    return 2.0 ** (slot * bits % 8)


@triton.jit
def _two_bytes(units):
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0x64646464, 0x4240; prmt.b32 $1, $2, 0x64646464, 0x4341;",
        "=&r,=&r,r",
        [units],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _four_nibbles(units):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 high;
        shr.b32 high, $4, 8;
        lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
        lop3.b32 $2, high, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $3, high, 0x00f000f0, 0x64006400, 0xea;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [units],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _eight_crumbs(units):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 high;
        shr.b32 high, $8, 8;
        lop3.b32 $0, $8, 0x00030003, 0x64006400, 0xea;
        lop3.b32 $1, $8, 0x000c000c, 0x64006400, 0xea;
        lop3.b32 $2, $8, 0x00300030, 0x64006400, 0xea;
        lop3.b32 $3, $8, 0x00c000c0, 0x64006400, 0xea;
        lop3.b32 $4, high, 0x00030003, 0x64006400, 0xea;
        lop3.b32 $5, high, 0x000c000c, 0x64006400, 0xea;
        lop3.b32 $6, high, 0x00300030, 0x64006400, 0xea;
        lop3.b32 $7, high, 0x00c000c0, 0x64006400, 0xea;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
        [units],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def codes_of(units, BITS: tl.constexpr, ASM: tl.constexpr):
    """int16 units to 16 / BITS float16 tensors of OFFSET + factor_of(slot, BITS) * code, one for each slot.

    With ASM two units of a register are unpacked at once; without, the same numbers in plain Triton, for interpreters
    and other vendors.
    """
    if ASM:
        if BITS == 8:
            codes = _two_bytes(units)
        elif BITS == 4:
            codes = _four_nibbles(units)
        else:
            codes = _eight_crumbs(units)
    else:
        codes = ()
        for slot in tl.static_range(16 // BITS):
            byte = units >> (slot * BITS // 8 * 8)
            code = byte & (((1 << BITS) - 1) << (slot * BITS % 8))
            codes = codes + ((code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True),)
    return codes


@triton.jit
def scale_and_minimum(words):
    """int32 scale words to float32 scales and minima."""
    scale = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def log2_and_inverse(x, ASM: tl.constexpr):
    """log2(x) and 1 / x of normal float32 x > 0, with ASM to some 22 bits."""
    if ASM:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        log2 = tl.log2(x)
        inverse = 1.0 / x
    return log2, inverse
