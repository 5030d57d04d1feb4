"""Sectors of 32 bytes that programs read of one token's row: where scale words lie, and how many heads a program has.

    python benchmarks/gpu_parts/sectors.py
    python benchmarks/gpu_parts/sectors.py --head-dim 64 --word-bits 16 --json

A GPU moves whole sectors from its last cache to a processor. Each program counts for itself: nobody says that two
of a row run on one processor. From memory a row comes once, since programs of all its heads run at once. Nothing is
timed. Places of the words:

- behind: behind the codes of all heads, as rows are
- beside: behind the codes of each head, without padding, so that codes are copied by 4 bytes
- padded: the same, padded so that the next head's codes are copied by 16 bytes
- apart: in a buffer of their own, a sector for slots side by side of one head, all of which are read together
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from kvtuner.precision import (
    ROW_ALIGNMENT_BYTES,
    THREE_BITS,
    WIDE_WORD_BITS,
    WORD_BITS,
    WordBits,
    row_bytes,
    used_word_bits,
    words_offset,
)
from kvtuner.report.table import Table

SECTOR_BYTES: Final = 32
Place = Literal["behind", "beside", "padded", "apart"]
"""The place of scale words in a row."""
Span = tuple[int, int]
"""The first byte of a row that is read, and the first behind it that is not."""


@dataclass(frozen=True, slots=True)
class SectorRow:
    """The row of one token's keys or values.

    Attributes:
        groups: The scale words of a head.
        place: The place of these in the row.
    """

    num_heads: int
    head_dim: int
    bits: int
    groups: int = 1
    word_bits: WordBits = WIDE_WORD_BITS
    place: Place = "behind"

    @property
    def code_bytes(self) -> int:
        """The bytes of a head's codes."""
        return self.head_dim * self.bits // 8

    @property
    def word_bytes(self) -> int:
        """The bytes of a head's words."""
        return self.groups * used_word_bits(self.bits, self.word_bits) // 8

    @property
    def useful_bytes(self) -> int:
        """The bytes of all heads' codes and words."""
        return self.num_heads * (self.code_bytes + self.word_bytes)

    @property
    def stride(self) -> int:
        """The bytes from one row to the next."""
        if self.place == "behind":
            group_size = self.head_dim // self.groups
            return row_bytes(self.num_heads, self.head_dim, self.bits, group_size, word_bits=self.word_bits)
        return _aligned(self.num_heads * self._head_stride)

    def spans(self, head: int) -> list[Span]:
        """The bytes of a row that hold a head's codes and, but where they lie apart, its words."""
        if self.place == "apart":
            return replace(self, place="behind").spans(head)[:-1]
        if self.place != "behind":
            first = head * self._head_stride
            return [(first, first + self.code_bytes + self.word_bytes)]
        words = words_offset(self.num_heads, self.head_dim, self.bits, self.word_bits)
        spans = [_part(words, self.word_bytes, head)]
        if self.bits == THREE_BITS:  # the third bytes of all heads lie behind their halfwords
            third = self.code_bytes // 3
            return [_part(0, 2 * third, head), _part(2 * third * self.num_heads, third, head), *spans]
        return [_part(0, self.code_bytes, head), *spans]

    def read_sectors(self, heads: int) -> float:
        """The sectors that all programs of a row read, of so many heads each; the mean of rows that start anywhere."""
        parities = range(0, SECTOR_BYTES, ROW_ALIGNMENT_BYTES) if self.stride % SECTOR_BYTES else (0,)
        counts = [
            len({
                sector
                for head in range(first, min(first + heads, self.num_heads))
                for start, end in self.spans(head)
                for sector in range((base + start) // SECTOR_BYTES, (base + end - 1) // SECTOR_BYTES + 1)
            })
            for base in parities for first in range(0, self.num_heads, heads)
        ]  # fmt: skip
        words = self.num_heads * self.word_bytes / SECTOR_BYTES if self.place == "apart" else 0.0
        return sum(counts) / len(parities) + words

    @property
    def _head_stride(self) -> int:
        used = self.code_bytes + (self.word_bytes if self.place != "apart" else 0)
        return _aligned(used) if self.place == "padded" else used


def _part(first: int, size: int, index: int) -> Span:
    return first + index * size, first + (index + 1) * size


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES


def counts_of(row: SectorRow) -> dict[str, Any]:
    """The bytes that programs of 1, 2, 4 and 8 heads read of a row, and that it takes, by those that are of use."""
    read = {
        heads: round(SECTOR_BYTES * row.read_sectors(heads) / row.useful_bytes, 3)
        for heads in (1, 2, 4, 8)
        if heads <= row.num_heads
    }
    apart = row.num_heads * row.word_bytes if row.place == "apart" else 0
    stored = round((row.stride + apart) / row.useful_bytes, 3)
    return {"bits": row.bits, "heads": row.num_heads, "place": row.place, "read": read, "stored": stored}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 4, 2])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--groups", type=int, default=1, help="scales of a head")
    parser.add_argument("--word-bits", type=int, choices=WORD_BITS, default=WIDE_WORD_BITS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [
        counts_of(SectorRow(heads, args.head_dim, bits, args.groups, args.word_bits, place))
        for heads, bits, place in itertools.product(args.kv_heads, (8, 4, 3, 2), get_args(Place))
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    headers = ("heads", "bits", "words", "read by 1", "2", "4", "8 heads a program", "stored")
    cells = [
        [str(row["heads"]), str(row["bits"]), row["place"]]
        + [f"{row['read'][heads]:.2f}" if heads in row["read"] else "" for heads in (1, 2, 4, 8)]
        + [f"{row['stored']:.2f}"]
        for row in rows
    ]
    print("\n".join(Table(headers, cells, left=(2,)).lines()))


if __name__ == "__main__":
    main()
