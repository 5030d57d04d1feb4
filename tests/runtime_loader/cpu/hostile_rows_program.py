"""Reads and writes rows of noise, in buffers with no byte to spare, by a library with sanitizers in it.

The arguments are an instruction set and the compiler's flags for sanitizers, whose libraries are preloaded. With the
variable ONE_ROW_TOO_MANY it reads beyond the rows, which a sanitizer must end.
"""

from __future__ import annotations

import itertools
import os
import sys

import torch

from kvtuner.precision import ALL_BITS, ExactWindow, num_slots
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.cpu import native_attention
from kvtuner.runtime_loader.cpu.library import load_library
from kvtuner.runtime_loader.cpu.native_attention import NativeAttention
from kvtuner.runtime_loader.exact_ring import ExactRing, NewTokens, WindowReads
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat


def noise(row_format: RowFormat, num_rows: int, generator: torch.Generator) -> PackedRows:
    """Rows of noise: scales that are infinite, NaN or negative among them."""
    if row_format.spec is None:
        shape = (num_rows, row_format.num_heads, row_format.head_dim)
        bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int32).to(torch.int16)
        return PackedRows(bits.view(torch.bfloat16), row_format)
    shape = (num_rows, row_format.row_bytes(torch.bfloat16))
    return PackedRows(torch.randint(0, 256, shape, generator=generator, dtype=torch.int32).to(torch.uint8), row_format)


def formats(channels: int, heads: int) -> list[RowFormat]:
    """Every width and number of groups that fit."""
    found = [RowFormat(heads, channels, None)]
    for bits, groups, word_bits in itertools.product(ALL_BITS[:-1], (1, 2), (32, 16)):
        if channels * bits % 16 == 0 and num_slots(bits) % groups == 0:
            found.append(
                RowFormat(heads, channels, QuantSpec(bits, group_size=channels // groups, word_bits=word_bits))
            )
        if word_bits == 32 and groups == 1 and channels * bits % 16 == 0:
            found.append(RowFormat(heads, channels, QuantSpec(bits, token_group=16)))
    return found


def ring_of_noise(heads: int, channels: int, generator: torch.Generator) -> ExactRing:
    """Copies whose positions no request may have, or several places have."""
    window = ExactWindow(5, 2)
    shape = (3, window.num_tokens)
    positions = torch.randint(-3, 80, shape, generator=generator, dtype=torch.int32)
    positions[0, :4], positions[2, 3] = 69, 2**31 - 1
    copies = torch.randn(*shape, heads, channels, generator=generator).bfloat16()
    return ExactRing(copies, copies.clone(), positions, window)


def main() -> None:
    """Run every shape by integer products and by float32."""
    name, *flags = sys.argv[1:]
    native_attention.load_library = lambda each: load_library(each, tuple(flags))
    generator = torch.Generator().manual_seed(0)
    for integers, (channels, heads) in itertools.product((True, False), ((8, 1), (40, 3), (80, 2), (128, 1), (272, 1))):
        native = NativeAttention(name, integer_products=integers)
        sides = formats(channels, heads)
        for k_format, v_format in zip(sides, [*sides[1:], sides[0]], strict=True):
            num_rows = 80  # whole groups of keys per channel
            if v_format.token_group > 1:  # of values there are none
                v_format = sides[0]
            keys, values = (noise(side, num_rows, generator) for side in (k_format, v_format))
            q = torch.randn(2, 3 * heads, channels, generator=generator)
            q[1, 0, 0] = torch.inf
            slots, indptr = torch.arange(num_rows), torch.tensor([0, 3, num_rows])
            if os.environ.get("ONE_ROW_TOO_MANY"):
                native._side(keys).num_rows += 1
                native._side(values).num_rows += 1
                slots[-1] = num_rows
            window = WindowReads(ring_of_noise(heads, channels, generator), torch.tensor([2, 0]))
            for cap, reads in itertools.product((0.0, 2.0), (None, window)):
                native.decode(q, keys, values, indptr, slots, ScoreScaling(0.1, cap), window=reads)
            last = torch.randn(2, heads, channels, generator=generator).bfloat16()
            native.store_copies(window.ring, NewTokens(window.requests, indptr), last, last)
            k, v = (torch.randn(16, heads, channels, generator=generator) for _ in range(2))
            bounds = ExtendBounds(torch.tensor([0, 4, 16]), indptr, slots, 12)
            new = torch.randn(16, 3 * heads, channels, generator=generator)
            native.extend(new, k, v, keys, values, bounds, ScoreScaling(0.1))
            k[0, 0, 0], k[1, 0, 1] = torch.nan, -torch.inf
            native.store(keys, values, torch.arange(num_rows - 16, num_rows), k, v)
    sys.stdout.write("rows of noise were read\n")


if __name__ == "__main__":
    main()
