"""Libraries that a processor runs, by its flags and by what the kernel lets a process use."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import pytest

from kvtuner.runtime_loader.cpu import instruction_sets
from kvtuner.runtime_loader.cpu.instruction_sets import INSTRUCTION_SETS, runnable_sets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

V4 = next(kind.needs for kind in INSTRUCTION_SETS if kind.name == "avx512")


@pytest.fixture
def runnable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[set[str], bool], list[str]]]:
    """The names of what an x86 processor with these flags runs, with or without permission for tiles."""

    def names(flags: set[str], may_use_tiles: bool) -> list[str]:
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(instruction_sets, "_processor_flags", lambda: set(flags))
        monkeypatch.setattr(instruction_sets, "_may_use_tiles", lambda: may_use_tiles)
        runnable_sets.cache_clear()
        return [kind.name for kind in runnable_sets()]

    yield names
    runnable_sets.cache_clear()


def test_tiles_are_taken_where_the_processor_and_the_kernel_have_them(
    runnable: Callable[[set[str], bool], list[str]],
) -> None:
    with_tiles = {*V4, "amx_tile", "amx_int8"}
    assert runnable(with_tiles, True) == ["amx", "avx512", "avx2", "generic"]
    assert runnable(with_tiles, False) == ["avx512", "avx2", "generic"]
    assert runnable({*V4, "amx_tile"}, True) == ["avx512", "avx2", "generic"]
    assert runnable(set(), True) == ["generic"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tiles are those of x86")
def test_the_kernel_grants_tiles_to_processors_that_have_them_alone() -> None:
    has_tiles = "amx_tile" in instruction_sets._processor_flags()
    assert instruction_sets._may_use_tiles() <= has_tiles
