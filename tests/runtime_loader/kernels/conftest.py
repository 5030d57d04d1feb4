"""The pairs of widths that kernels in Triton's interpreter are tested on."""

from __future__ import annotations

import itertools

import pytest

from kvtuner.precision import ALL_BITS

QUICK_PAIRS = ((2, 3), (3, 4), (4, 8), (8, 16), (16, 2))
"""The pairs of `make check`, every width once on each side; `make test` takes them all."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `k_bits` and `v_bits` on every pair of widths."""
    if {"k_bits", "v_bits"} <= set(metafunc.fixturenames):
        pairs = [
            pytest.param(*pair, marks=() if pair in QUICK_PAIRS else pytest.mark.slow)
            for pair in itertools.product(ALL_BITS, repeat=2)
        ]
        metafunc.parametrize(("k_bits", "v_bits"), pairs)
