"""Attention by every library that this processor runs, in either kind of products."""

from __future__ import annotations

import pytest

from kvtuner.runtime_loader.cpu.library import INSTRUCTION_SETS, compiler, runnable_sets
from kvtuner.runtime_loader.cpu.native_attention import NativeAttention


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `native` by every library, with integer products and without."""
    if "native" in metafunc.fixturenames:
        kinds = [(kind.name, integers) for kind in INSTRUCTION_SETS for integers in (True, False)]
        ids = [f"{name}-{'int16' if integers else 'float32'}" for name, integers in kinds]
        metafunc.parametrize("native", kinds, ids=ids, indirect=True)


@pytest.fixture
def native(request: pytest.FixtureRequest) -> NativeAttention:
    name, integers = request.param
    if name not in [kind.name for kind in runnable_sets()]:
        pytest.skip(f"this processor has no {name}")
    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    return NativeAttention(name, integer_products=integers)
