"""Libraries for processors with tiles (AMX) give the bytes of that for AVX-512, on a processor that Bochs emulates.

`make test-amx` builds the emulator and runs this; elsewhere it is skipped by name. Jobs of attention are recorded here
and run there by each library in turn, all in one start of the machine.
"""

from __future__ import annotations

import itertools
import subprocess
from typing import TYPE_CHECKING, Final

import pytest
import torch
from wheels.emulated_library import ROOT, compile_program
from wheels.recorded_library import RecordedLibrary

from kvtuner.precision import num_slots
from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.cpu.instruction_sets import INSTRUCTION_SETS, runnable_sets
from kvtuner.runtime_loader.cpu.library import COMPILER_FLAGS, compile_library, compiler, load_library, sources_in
from kvtuner.runtime_loader.cpu.native_attention import NativeAttention
from kvtuner.runtime_loader.packed_attention import ExtendBounds, PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat
from tools.amx import emulated_machine
from tools.make_platform_wheels import LINKER_FLAGS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(emulated_machine.missing() is not None, reason=str(emulated_machine.missing())),
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler"),
]
REFERENCE: Final = ("avx512", ())
LIBRARIES: Final = {"by_tiles": ("amx", ()), "other_sums": ("avx512", ("-ffast-math",))}
"""The instruction set and further flags of each library that is compared with the reference."""
SHAPES: Final = ((2, 80, 3), (1, 64, 16), (2, 128, 12), (1, 256, 17))
"""The KV heads, channels and query heads to a KV head."""
LENGTHS: Final = (0, 1, 63, 64, 65, 130)
NUM_SLOTS: Final = 512
MOST_SECONDS: Final = 900
"""The most seconds that the machine may take; beside other work on two cores it took some 300."""


def rows(native: NativeAttention, heads: int, channels: int, spec: QuantSpec, seed: int) -> PackedRows:
    """Rows of tokens whose sizes differ by orders of magnitude, with channels off zero."""
    generator = torch.Generator().manual_seed(seed)
    row_format = RowFormat(heads, channels, spec)
    states = torch.exp(torch.randn(NUM_SLOTS, 1, 1, generator=generator)) * torch.randn(
        NUM_SLOTS, heads, channels, generator=generator
    )
    states += torch.randn(heads, channels, generator=generator)
    return PackedRows(row_format.pack(states), row_format)


def recorded_jobs() -> dict[str, bytes]:
    """The jobs of each case: decoding, and new tokens that read a prefix, of every width.

    A head has one scale in a word of 32 bits, or several in words of 16 bits.
    """
    cases: dict[str, bytes] = {}
    for (heads, channels, gqa), bits, is_grouped in itertools.product(SHAPES, (2, 3, 4, 8), (False, True)):
        if channels * bits % 16:
            continue
        native = NativeAttention(integer_products=True)
        spec = QuantSpec(bits)
        if is_grouped:
            spec = QuantSpec(bits, group_size=2 * channels // num_slots(bits), word_bits=16)
        keys, values = (rows(native, heads, channels, spec, seed) for seed in (1, 2))
        library = RecordedLibrary(load_library(runnable_sets()[0].name))
        native._library = library
        generator = torch.Generator().manual_seed(7)
        slots = torch.randperm(NUM_SLOTS, generator=generator)[: sum(LENGTHS)]
        indptr, scores = torch.tensor([0, *itertools.accumulate(LENGTHS)]), ScoreScaling(channels**-0.5)
        q = torch.randn(len(LENGTHS), gqa * heads, channels, generator=generator).bfloat16()
        native.decode(q, keys, values, indptr, slots, scores)
        new = torch.arange(len(LENGTHS) + 1) * 3
        q = torch.randn(int(new[-1]), gqa * heads, channels, generator=generator).bfloat16()
        k, v = (torch.randn(int(new[-1]), heads, channels, generator=generator).bfloat16() for _ in range(2))
        native.extend(q, k, v, keys, values, ExtendBounds(new, indptr, slots, 3), scores)
        kind = "grouped" if is_grouped else "whole"
        cases[f"{heads}x{channels}x{gqa}-{bits}bits-{kind}"] = library.jobs
    return cases


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the machine prints: of its tiles, and a line for each case and library."""
    folder, path = tmp_path_factory.mktemp("amx"), compiler()
    assert path is not None
    programs = {"/attend": folder / "attend", "/tiles": folder / "tiles"}
    compile_program(path, programs["/attend"])
    tiles = ["-O2", "-x", "c", "-mamx-tile", "-mamx-int8", str(ROOT / "tools/amx/tiles.c")]
    subprocess.run(["gcc", *tiles, "-o", str(programs["/tiles"])], check=True)
    for name, (instruction_set, flags) in {"reference": REFERENCE, **LIBRARIES}.items():
        programs[f"/{name}.so"] = compiled(path, instruction_set, flags, folder / f"{name}.so")
    files = emulated_machine.with_libraries(programs)
    files |= {f"/jobs/{name}": jobs for name, jobs in recorded_jobs().items()}
    files["/main"] = f"""
        set -e
        cd /jobs
        /tiles
        for job in *; do
            /attend /reference.so < $job > /tmp/reference
            for library in {" ".join(LIBRARIES)}; do
                /attend /$library.so < $job > /tmp/answers
                echo "$job $library $(/bin/busybox cmp /tmp/reference /tmp/answers 2>&1 || :)"
            done
        done
    """.encode()
    return emulated_machine.run(files, MOST_SECONDS).splitlines()


def compiled(path_of_compiler: str, instruction_set: str, flags: tuple[str, ...], path: Path) -> Path:
    kind = next(each for each in INSTRUCTION_SETS if each.name == instruction_set)
    command = [path_of_compiler, *COMPILER_FLAGS, *kind.compiler_flags, *LINKER_FLAGS, *flags]
    compile_library(command, sources_in(ROOT / "runtime_loader" / "cpu"), path)
    return path


def differences(console: list[str], library: str) -> dict[str, str]:
    """What `cmp` says of each case where a library's answers are not the reference's; empty where they are."""
    lines = [line.split(" ", 2) for line in console if f" {library} " in line]
    return {case: difference for case, _, difference in lines}


def test_tiles_of_the_machine_are_right_for_two_processes_at_once(console: list[str]) -> None:
    assert "0 sums of tiles differ, another process ended with 0" in console


def test_tiles_give_the_bytes_of_vectors(console: list[str]) -> None:
    found = differences(console, "by_tiles")
    assert len(found) == len(recorded_jobs()) > 20
    assert not {case: difference for case, difference in found.items() if difference}


def test_sums_in_another_order_are_told_apart(console: list[str]) -> None:
    found = differences(console, "other_sums")
    assert len(found) == len(recorded_jobs())
    assert all(" differ: " in difference for difference in found.values())
