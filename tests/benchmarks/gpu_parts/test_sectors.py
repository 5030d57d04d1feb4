"""The count of sectors: its places of codes and words are those that rows have, and its sums are those by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_parts.pools import HeadShape, row_format  # noqa: E402
from gpu_parts.sectors import SECTOR_BYTES, SectorRow, counts_of  # noqa: E402

if TYPE_CHECKING:
    from kvtuner.precision import WordBits


@pytest.mark.parametrize("word_bits", [32, 16])
@pytest.mark.parametrize(("head_dim", "groups"), [(128, 1), (128, 2), (80, 1)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_heads_bytes_are_those_that_change_with_its_numbers(
    bits: int, head_dim: int, groups: int, word_bits: WordBits
) -> None:
    stored = row_format(HeadShape("", 3, 1, head_dim, head_dim // groups, word_bits), bits)
    row = SectorRow(3, head_dim, bits, groups, word_bits)
    generator = torch.Generator().manual_seed(bits)
    states = torch.randn(200, 3, head_dim, generator=generator)
    packed = stored.pack(states)
    assert packed.shape[1] == row.stride
    for head in range(3):
        changed = states.clone()
        changed[:, head] = torch.randn(200, head_dim, generator=generator)
        found = (stored.pack(changed) != packed).any(0).nonzero().flatten().tolist()
        assert found == sorted(byte for start, end in row.spans(head) for byte in range(start, end))


@pytest.mark.parametrize(
    ("bits", "place", "heads", "sectors"),
    [
        (4, "behind", 1, 8 * 3),  # 64 bytes of codes, and the one sector of all words for each head
        (4, "behind", 2, 4 * 5),
        (4, "behind", 8, 17),
        (4, "padded", 1, 8 * 3),  # 80 bytes from one head to the next
        (2, "behind", 1, 8 * 2),
        (2, "behind", 4, 2 * 5),
        (2, "padded", 1, 8 * 2),
        (4, "apart", 1, 8 * 2 + 1),  # of eight heads' sectors of words, an eighth each
        (2, "apart", 2, 8 * 1 + 1),
        (8, "behind", 1, 8 * 5),
        (3, "behind", 1, 8 * (1 + 1 + 1)),  # halfwords, third bytes and a word, of which third bytes fill half a sector
    ],
)
def test_sectors_are_those_by_hand(bits: int, place: str, heads: int, sectors: int) -> None:
    assert SectorRow(8, 128, bits, place=place).read_sectors(heads) == sectors  # type: ignore[arg-type]


def test_a_row_at_half_a_sector_counts_half_the_time() -> None:
    row = SectorRow(1, 64, 4)  # 32 bytes of codes and a word: rows lie 48 bytes apart
    assert (row.stride, row.read_sectors(1)) == (48, 2.0)
    assert SectorRow(1, 64, 2).read_sectors(1) == 1.0  # 16 bytes and 4, in 32
    assert SectorRow(3, 64, 4).stride % SECTOR_BYTES == 16
    assert (
        SectorRow(3, 64, 4).read_sectors(1) == (6 + 8) / 2
    )  # of the three heads' codes, each in 32 bytes, two sectors where a row begins amid one


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_no_place_of_words_saves_what_more_heads_of_a_program_do(bits: int) -> None:
    behind, beside, padded = (
        counts_of(SectorRow(8, 128, bits, place=place))["read"] for place in ("behind", "beside", "padded")
    )
    assert behind[1] == beside[1] == padded[1]
    assert behind[8] < behind[2] < behind[1]
