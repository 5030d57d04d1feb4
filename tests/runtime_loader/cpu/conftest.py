"""Attention by every library that this processor runs, in either kind of products, and by that of aarch64 in qemu."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from wheels.emulated_library import EmulatedLibrary, missing
from wheels.tiles_by_loops import TILES, VECTORS, attention_by_tiles

from kvtuner.runtime_loader.cpu import native_attention
from kvtuner.runtime_loader.cpu.instruction_sets import INSTRUCTION_SETS, runnable_sets
from kvtuner.runtime_loader.cpu.library import compiler
from kvtuner.runtime_loader.cpu.native_attention import NativeAttention

if TYPE_CHECKING:
    from collections.abc import Iterator

EMULATED = "neon"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `native` by every library, with integer products and without."""
    if "native" in metafunc.fixturenames:
        cases = [
            pytest.param(
                (kind.name, integers),
                id=f"{kind.name}-{'int16' if integers else 'float32'}",
                marks=[pytest.mark.slow] if kind.name == EMULATED and kind not in runnable_sets() else [],
            )
            for kind in INSTRUCTION_SETS
            for integers in (True, False)
        ]
        metafunc.parametrize("native", cases, indirect=True)


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedLibrary]:
    if reason := missing():
        pytest.skip(reason)
    library = EmulatedLibrary(EMULATED, tmp_path_factory.mktemp("emulated"))
    yield library
    library.close()


@pytest.fixture
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NativeAttention:
    name, integers = request.param
    runnable = [kind.name for kind in runnable_sets()]
    if name == EMULATED and name not in runnable:
        library = request.getfixturevalue("emulated")
        monkeypatch.setattr(native_attention, "runnable_sets", lambda: INSTRUCTION_SETS)
        monkeypatch.setattr(native_attention, "load_library", lambda _: library)
    elif compiler() is None:
        pytest.skip("there is no C++ compiler")
    elif name == TILES and VECTORS in runnable:
        return attention_by_tiles(integer_products=integers)
    elif name not in runnable:
        pytest.skip(f"this processor has no {name}")
    return NativeAttention(name, integer_products=integers)
