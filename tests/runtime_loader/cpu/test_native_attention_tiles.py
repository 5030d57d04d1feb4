"""Attention by tiles (AMX) has to the bit the results of vectors, whatever the shape and whatever rows hold."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from importlib import resources
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wheels.tiles_by_loops import LOOPS_FOR_TILES, TILES, VECTORS, attention_by_tiles

from kvtuner.precision import num_slots
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.cpu import library
from kvtuner.runtime_loader.cpu.instruction_sets import INSTRUCTION_SETS, runnable_sets
from kvtuner.runtime_loader.cpu.library import COMPILER_FLAGS, compile_library, compiler
from kvtuner.runtime_loader.cpu.native_attention import NativeAttention
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat

if TYPE_CHECKING:
    from pathlib import Path

SCORES = ScoreScaling(0.125)
TILE_INSTRUCTIONS = ("ldtilecfg", "tileloadd", "tdpbsud", "tdpbuud", "tilestored", "tilerelease")
pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler"),
    pytest.mark.skipif(VECTORS not in [kind.name for kind in runnable_sets()], reason="this processor has no avx512"),
]


@st.composite
def sides(draw: st.DrawFn, heads: int, num_rows: int, generator: torch.Generator) -> PackedRows:
    bits = draw(st.sampled_from((2, 3, 4, 8)))
    # The units of a head may be of an odd number.
    channels = {2: 8, 3: 16, 4: 4, 8: 2}[bits] * draw(st.integers(1, 34))
    smallest = channels // num_slots(bits)
    sizes = [size for size in range(smallest, channels + 1, smallest) if channels % size == 0]
    spec = QuantSpec(bits, group_size=draw(st.sampled_from(sizes)), word_bits=draw(st.sampled_from((32, 16))))
    row_format = RowFormat(heads, channels, spec)
    packed = row_format.pack(torch.randn(num_rows, heads, channels, generator=generator))
    if draw(st.booleans()):  # codes of noise, and scales that are no numbers
        packed = torch.randint(0, 256, packed.shape, generator=generator, dtype=torch.uint8)
    return PackedRows(packed, row_format)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_tiles_have_the_results_of_vectors_to_the_bit(data: st.DataObject) -> None:
    heads, gqa = data.draw(st.integers(1, 3)), data.draw(st.sampled_from((1, 3, 5, 7, 8, 12, 16, 17, 33)))
    lengths = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=3))
    new = data.draw(st.lists(st.integers(1, 30), min_size=len(lengths), max_size=len(lengths)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    num_rows = sum(lengths) + 4
    keys, values = (data.draw(sides(heads, num_rows, generator)) for _ in range(2))
    slots = torch.randperm(num_rows, generator=generator)[: sum(lengths)]
    indptr = torch.tensor([0, *itertools.accumulate(lengths)])
    scores = ScoreScaling(keys.format.head_dim**-0.5, data.draw(st.sampled_from((0.0, 3.0))))
    q, k, v = (
        torch.randn(sum(new), count, channels, generator=generator)
        for count, channels in (
            (heads * gqa, keys.format.head_dim), (heads, keys.format.head_dim), (heads, values.format.head_dim),
        )
    )  # fmt: skip
    bounds = ExtendBounds(torch.tensor([0, *itertools.accumulate(new)]), indptr, slots, max(new))
    tiles = attention_by_tiles(integer_products=True)
    vectors = NativeAttention(VECTORS, integer_products=True)
    for attend in (
        lambda attention: attention.decode(q[: len(lengths)], keys, values, indptr, slots, scores),
        lambda attention: attention.extend(q, k, v, keys, values, bounds, scores),
    ):
        torch.testing.assert_close(attend(tiles), attend(vectors), rtol=0, atol=0, equal_nan=True)


def test_more_than_eight_queries_are_multiplied_by_tiles(tmp_path: Path) -> None:
    """A fault in the loops for tiles changes the results of nine queries of a KV head, and not those of eight."""
    path, sources = compiler(), tmp_path / "sources"
    assert path is not None
    with resources.as_file(resources.files("kvtuner.runtime_loader.cpu")) as package:
        shutil.copytree(package / "sources", sources)
    right = (sources / "tiles.h").read_text(encoding="utf-8")
    assert "sum += (columns" in right
    (sources / "tiles.h").write_text(right.replace("sum += (columns", "sum -= (columns"), encoding="utf-8")
    kind = next(kind for kind in INSTRUCTION_SETS if kind.name == VECTORS)
    command = [path, *COMPILER_FLAGS, *kind.compiler_flags, *LOOPS_FOR_TILES]
    compile_library(command, sorted(sources.iterdir()), tmp_path / "faulty.so")
    vectors, faulty = (NativeAttention(VECTORS, integer_products=True) for _ in range(2))
    faulty._library = library._loaded(tmp_path / "faulty.so")
    row_format = RowFormat(1, 64, QuantSpec(4))
    rows = PackedRows(row_format.pack(torch.randn(70, 1, 64)), row_format)
    for num_queries, is_equal in ((8, True), (9, False)):
        found, expected = (
            each.decode(torch.ones(1, num_queries, 64), rows, rows, torch.tensor([0, 70]), torch.arange(70), SCORES)
            for each in (faulty, vectors)
        )
        assert torch.equal(found, expected) == is_equal


def test_products_of_tiles_are_in_its_library_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is compiled here, and runs where a processor has tiles (`make test-amx` emulates one)."""
    disassembler = shutil.which("objdump")
    if disassembler is None:
        pytest.skip("there is no objdump")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {}
    for name in (TILES, VECTORS):
        kind = next(kind for kind in INSTRUCTION_SETS if kind.name == name)
        built = library._compiled(kind, ())
        text = subprocess.run([disassembler, "-d", str(built)], capture_output=True, text=True, check=True).stdout
        found[name] = {word for word in TILE_INSTRUCTIONS if word in text}
    assert found == {TILES: set(TILE_INSTRUCTIONS), VECTORS: set()}
