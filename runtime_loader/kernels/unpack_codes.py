"""Arithmetic inside kernels: codes of units as numbers that a tensor core takes, scales, and fp16.

The bits of a code, alone in a halfword, are a subnormal fp16: 2 ** -24 for every one of the integer that they are.
Where the code lies higher than in the lowest bits it is larger by a power of two, which saves the shift. Tensor cores
multiply subnormal fp16 exactly (Fasi et al., Numerical behavior of NVIDIA tensor cores, PeerJ CS 2021), so whoever
multiplies divides by both factors afterwards, and nothing was rounded.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

# The fp16 number that a code of 1 in the lowest bits is.
ONE: Final = tl.constexpr(2.0**-24)
# The selectors, of PTX's prmt, of the second bytes of two units beside the low or the high bytes of two halfwords.
LOW_THIRD: Final = tl.constexpr(0x6341)
HIGH_THIRD: Final = tl.constexpr(0x7351)


@triton.constexpr_function
def slots_of(bits):
    """Return the codes of a unit, as `num_slots` does, which kernels cannot call; 1 for native numbers."""
    return 8 if bits == 3 else 16 // bits


@triton.constexpr_function
def power_of_two(number):
    """Return the least power of two that is at least a positive number; SGLang's replaces Triton's, for hosts alone."""
    return 1 << (number - 1).bit_length()


@triton.constexpr_function
def words_at(heads, units, bits, word_bits):
    """Return the place of a row's first scale word, in words, as `words_offset` does in bytes."""
    code_bytes, word_bytes = heads * units * (3 if bits == 3 else 2), word_bits // 8
    return (code_bytes + word_bytes - 1) // word_bytes if bits == 3 else code_bytes // word_bytes


@triton.constexpr_function
def factor_of(slot, bits):
    """Return how many times `ONE` the codes of a slot are."""
    return 2.0 ** (slot * bits % 8)


@triton.jit
def for_each(function: tl.constexpr, COUNT: tl.constexpr, arguments):
    """Return the tuple of ``function(index, *arguments)`` for each index below COUNT."""
    # Slots and groups lie in tuples, since Triton takes no slice of a tensor.
    results = ()
    for index in tl.static_range(COUNT):
        results = results + (function(index, *arguments),)
    return results


@triton.jit
def zeros(_, SHAPE: tl.constexpr):
    """A tile of zeros, for each of what `for_each` counts."""
    return tl.zeros(SHAPE, tl.float32)


@triton.constexpr_function
def _even_part(number):
    """Return the greatest power of two that divides a number."""
    return number & -number


@triton.jit
def row_offsets(slots, ROW: tl.constexpr, SHAPE: tl.constexpr, ASM: tl.constexpr):
    """The offsets of rows, of slots of 32 bits without a sign that are broadcast to a tile of two axes."""
    # To the whole tile before any arithmetic: what moves to the lanes that copy is then a slot and not a pointer.
    offsets = tl.broadcast_to(slots, SHAPE).to(tl.int64) * ROW
    if ASM:
        # By an instruction that does nothing, behind which LLVM does not see the product. With the sum that follows it
        # would make one PTX instruction, which ptxas takes apart to three before sm_120; a product and a sum it joins.
        offsets = tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [offsets], tl.int64, is_pure=True, pack=1)
        EVEN: tl.constexpr = _even_part(ROW)
        TOKENS_FIRST: tl.constexpr = slots.shape[1] == 1
        offsets = tl.multiple_of(offsets, [EVEN, EVEN])
        if TOKENS_FIRST:
            offsets = tl.max_constancy(offsets, [1, SHAPE[1]])
        else:
            offsets = tl.max_constancy(offsets, [SHAPE[0], 1])
    return offsets


# One result for each piece of assembly: of several, Triton 3.8 gives all but the first another layout, and moves them
# through shared memory.


@triton.jit
def _codes(units, ASM: tl.constexpr):
    """Mask the codes of one slot of two units in a register, by one instruction."""
    return tl.inline_asm_elementwise(ASM, "=r,r", [units], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def masked_halves(x, mask):
    """The bits of float16 numbers that an int16 mask has."""
    return tl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _high_bytes(units):
    """Move high bytes to where low ones are; bits of the other unit lie beside them, which masks take off."""
    return tl.inline_asm_elementwise("shr.u32 $0, $1, 8;", "=r,r", [units], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def _upper_bytes(units, first, second, ASM: tl.constexpr):
    """Join the second and the third byte of units, two in a register, of what `load_thirds` found."""
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r", [units, first, second], dtype=tl.int16, is_pure=True, pack=2)


@triton.constexpr_function
def _joining(are_selected):
    """Return the assembly of `_upper_bytes`: third bytes that a selector tells, or the low byte or the high one."""
    if are_selected:
        return "prmt.b32 $0, $1, $2, $3;"
    return "{.reg .b32 t; prmt.b32 t, $1, $2, 0x6341; lop3.b32 $0, t, $3, 0xff00ff00, 0xf8;}"


@triton.jit
def _plain_codes(slot, units, BITS: tl.constexpr):
    """Mask the codes of one slot without assembly."""
    byte = units >> (slot * BITS // 8 * 8)  # the shape of units
    code = byte & (((1 << BITS) - 1) << (slot * BITS % 8))  # the shape of units
    return code.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def third_bytes(row_ptrs, head, unit, HEADS: tl.constexpr, UNITS: tl.constexpr):
    """Return pointers to the third bytes of units, where `row_ptrs` and `unit` are broadcast to a tile."""
    HALF: tl.constexpr = UNITS // 2
    byte_ptrs = row_ptrs.to(tl.pointer_type(tl.uint8), bitcast=True)
    return byte_ptrs + (2 * (HEADS * UNITS + head * HALF + unit % HALF) + unit // HALF)


@triton.jit
def third_selectors(rows_ptr, unit, never, BITS: tl.constexpr, UNITS: tl.constexpr):
    """The selectors of the bytes that `load_thirds` finds, in the shape of `unit`; `never` is false on the device.

    Units from UNITS on are those of other heads. There are none but at 3 bits, nor where two units of a register may
    have different bytes of their halfwords.
    """
    # A tensor core's operand must come of loads, constants and elementwise operations alone, or Triton moves it through
    # shared memory once more: so selectors are what a load has in the place of what it does not read.
    selectors = ()
    HALF: tl.constexpr = UNITS // 2
    if BITS == 3 and HALF % 2 == 0:
        selector = tl.where(unit // HALF % 2 == 0, LOW_THIRD, HIGH_THIRD).to(tl.int16)
        selectors = (tl.load(rows_ptr + unit, mask=(unit >= 0) & never, other=selector),)
    return selectors


@triton.jit
def load_thirds(rows_ptr, rows, head, unit, mask, selectors, HEADS: tl.constexpr, UNITS: tl.constexpr):
    """Load the halfwords of third bytes of units, of rows at offsets `rows`; `mask` is that of units.

    They lie behind the other bytes of all units, those of units u and u + UNITS / 2 of a head in one halfword. Units
    from UNITS on are those of heads behind `head`. Two tiles are returned: all halfwords and `selectors`, which are
    those of `third_selectors`, or, without these, the halfwords of a head's units below UNITS / 2 and those of the
    others, with zeros elsewhere.
    """
    HALF: tl.constexpr = UNITS // 2
    third_ptrs = (rows_ptr + (HEADS * UNITS + head * HALF + unit // UNITS * HALF + unit % HALF)) + rows
    if len(selectors) > 0:
        first = tl.load(third_ptrs, mask=mask, other=0)
        second = tl.broadcast_to(selectors[0], first.shape)
    else:  # no unit is asked which byte is its own: masks of loads tell
        is_low = unit // HALF % 2 == 0
        first = tl.load(third_ptrs, mask=mask & is_low, other=0)
        second = tl.load(third_ptrs, mask=mask & ~is_low, other=0)
    return first, second, len(selectors) > 0


@triton.jit
def with_thirds(units, thirds):
    """Join int16 units and what `load_thirds` found to int32 units of 24 bits."""
    if thirds[2]:
        third = (thirds[0].to(tl.int32) >> tl.where(thirds[1] == HIGH_THIRD, 8, 0)) & 0xFF  # the shape of units
    else:
        third = (thirds[0].to(tl.int32) & 0xFF) | ((thirds[1].to(tl.int32) & 0xFF00) >> 8)  # the shape of units
    return (units.to(tl.int32) & 0xFFFF) | third << 16


@triton.constexpr_function
def _mask_of(slot, bits):
    """Return the assembly that masks the codes of a slot, two units in a register."""
    if bits == 8:
        return f"prmt.b32 $0, $1, 0, {('0x4240', '0x4341')[slot]};"  # a byte moves to the low half of its halfword
    if bits == 3:
        mask = (0x07, 0x38, 0x1C0, 0x0E, 0x70, 0x380, 0x1C, 0xE0)[slot]
    else:
        mask = ((1 << bits) - 1) << (slot * bits % 8)
    return f"and.b32 $0, $1, 0x{mask:04x}{mask:04x};"


@triton.jit
def codes_of(slot: tl.constexpr, units, thirds, BITS: tl.constexpr, ASM: tl.constexpr):
    """Unpack a slot of int16 units to float16 numbers, ONE * factor_of(slot, BITS) * code each.

    At 3 bits `thirds` are what `load_thirds` found. What slots share is computed once, whichever of them come first.
    """
    if not ASM:
        # The same numbers in plain Triton, for interpreters and other vendors.
        if BITS == 3:
            units = with_thirds(units, thirds)
        codes = _plain_codes(slot, units, BITS)
    elif BITS == 3:
        halves = units
        if slot >= 3:
            halves = _upper_bytes(units, thirds[0], thirds[1], _joining(thirds[2]))
        if slot >= 6:
            halves = _high_bytes(halves)
        codes = _codes(halves, _mask_of(slot, BITS))
    else:
        halves = units
        if BITS != 8 and slot * BITS >= 8:
            halves = _high_bytes(units)
        codes = _codes(halves, _mask_of(slot, BITS))
    return codes


@triton.jit
def scale_and_minimum(words, ASM: tl.constexpr = False):
    """Split scale words of 32 bits into float32 scales and minima."""
    if ASM:
        # Either half is an operand of the conversion: nothing masks or shifts it first.
        scale = _half(words, "{.reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l;}")
        minimum = _half(words, "{.reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h;}")
    else:
        scale = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, minimum


@triton.jit
def _half(words, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=f,r", [words], dtype=tl.float32, is_pure=True, pack=1)


@triton.constexpr_function
def offset_step(bits, word_bits):
    """Return the factor by which a group's offset counts: short words hold a zero point in units of 2^bits / 32."""
    return -(2.0 ** (bits - 5)) if word_bits == 16 else 1.0


@triton.jit
def scale_and_zero_point(words, HALF: tl.constexpr):
    """Split short words, the lower or the upper halves of 32 bits, into float32 scales and `ONE` times zero points."""
    # Fp16 without its sign and its lowest four bits, above the zero point, whose bits alone are a subnormal fp16.
    scale = ((words >> 1) & 0x7FF07FF0) >> (16 * HALF)
    zero_point = (words & 0x001F001F) >> (16 * HALF)
    return (
        scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
        zero_point.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
    )


@triton.jit
def log2_and_inverse(x, ASM: tl.constexpr):
    """Return log2(x) and 1 / x of normal float32 x > 0, with ASM to some 22 bits."""
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


@triton.jit
def fp16_saturated(x):
    """Return the nearest fp16, at most 65504."""
    # NaN stays NaN, which minimum and maximum of a GPU would lose.
    return tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x)).to(tl.float16)
