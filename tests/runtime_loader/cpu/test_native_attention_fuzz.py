"""Whatever the shape, attention in C++ is attention over what rows mean; and rows of noise are read within bounds."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.dequantized_attention import dequantized_decode
from wheels.tiles_by_loops import LOOPS_FOR_TILES, VECTORS

from kvtuner.precision import ALL_BITS, num_slots
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.cpu import library
from kvtuner.runtime_loader.cpu.instruction_sets import runnable_sets
from kvtuner.runtime_loader.cpu.library import compiler
from kvtuner.runtime_loader.cpu.native_attention import NativeAttention
from kvtuner.runtime_loader.packed_attention import PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
SANITIZERS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
PROGRAM = Path(__file__).parent / "hostile_rows_program.py"


@st.composite
def row_formats(draw: st.DrawFn, heads: int, channels: int, token_groups: tuple[int, ...]) -> RowFormat:
    bits, token_group = draw(st.sampled_from(ALL_BITS)), draw(st.sampled_from(token_groups))
    if bits == 16:
        return RowFormat(heads, channels, None)
    assume(channels * bits % 16 == 0)
    if token_group > 1:
        return RowFormat(heads, channels, QuantSpec(bits, token_group=token_group, symmetric=draw(st.booleans())))
    smallest = channels // num_slots(bits)
    sizes = [size for size in range(smallest, channels + 1, smallest) if channels % size == 0]
    spec = QuantSpec(
        bits,
        group_size=draw(st.sampled_from(sizes)),
        symmetric=draw(st.booleans()),
        word_bits=draw(st.sampled_from((32, 16))),
    )
    return RowFormat(heads, channels, spec)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_reads_what_its_rows_mean(data: st.DataObject) -> None:
    heads, gqa = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    channels, v_channels = (8 * data.draw(st.integers(1, 34)) for _ in range(2))
    keys, values = data.draw(row_formats(heads, channels, (1, 16, 64))), data.draw(row_formats(heads, v_channels, (1,)))
    lengths = data.draw(st.lists(st.integers(0, 140), min_size=1, max_size=4))
    kind, integers = data.draw(st.sampled_from(runnable_sets())), data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    num_slots_of_pool = -(-(sum(lengths) + data.draw(st.integers(1, 9))) // 64) * 64  # whole groups
    slots = torch.randperm(num_slots_of_pool, generator=generator)[: sum(lengths)]
    sides = []
    for side in (keys, values):
        states = torch.randn(num_slots_of_pool, heads, side.head_dim, generator=generator)
        sides.append(PackedRows(side.pack(states), side))
    q = torch.randn(len(lengths), heads * gqa, channels, generator=generator)
    indptr = torch.tensor([0, *itertools.accumulate(lengths)])
    scores = ScoreScaling(channels**-0.5, data.draw(st.sampled_from((0.0, 3.0))))
    found = NativeAttention(kind.name, integer_products=integers).decode(q, *sides, indptr, slots, scores)
    expected = dequantized_decode(q, *sides, indptr, slots, scores)
    # Of scores of a few nats; rows of 8 channels and of 272.
    assert (found - expected).abs().max() <= (1e-3 if integers else 2e-5) * expected.abs().max().clamp(min=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags"),
    [*((kind.name, ()) for kind in runnable_sets()), pytest.param(VECTORS, LOOPS_FOR_TILES, id="tiles")],
)
def test_hostile_rows_are_read_and_written_within_bounds(kind: str, flags: tuple[str, ...]) -> None:
    """The sanitizers for addresses and undefined behaviour are in a process from its start."""
    if kind not in [each.name for each in runnable_sets()]:
        pytest.skip(f"this processor has no {kind}")
    path = compiler()
    assert path is not None
    runtimes = []
    for name in ("libasan.so", "libubsan.so"):
        asked = [path, f"-print-file-name={name}"]
        found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(found).is_absolute():
            pytest.skip(f"the compiler has no {name}")
        runtimes.append(found)
    library._compiled(next(each for each in runnable_sets() if each.name == kind), (*SANITIZERS, *flags))
    variables = {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(PROGRAM), kind, *SANITIZERS, *flags]
        environment = {**os.environ, **variables, **more}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)

    done = run()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("rows of noise were read\n")
    assert "ERROR: AddressSanitizer" in run(ONE_ROW_TOO_MANY="1").stderr
