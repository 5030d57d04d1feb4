"""The package names its public functions, and imports nothing until one of them is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvtuner.exported_configs as package
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair

ROOT = Path(__file__).resolve().parents[2]


def test_import_loads_no_module_of_the_package_and_no_heavy_library() -> None:
    program = (
        "import sys, kvtuner.exported_configs; sys.exit(bool({'pydantic', 'torch', 'numpy'} & set(sys.modules))"
        " or any(name.startswith('kvtuner.exported_configs.') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_profile_is_built_with_public_names_and_that_of_uniform_layers_is_the_same() -> None:
    geometry = ModelGeometry(2, 2, 1, 16, 16)
    model = package.ModelIdentity(
        id="owner/model", revision=None, config_sha256="sha256:" + "0" * 64, architecture="A", dtype="float32"
    )
    built = package.build_profile(
        geometry=geometry,
        layers=[package.LayerQuantization(4, 2)] * 2,
        model=model,
        budget=package.AskedBudget("K4V2"),
    )
    assert built == package.uniform_profile(geometry, PrecisionPair(4, 2), model)


def test_every_public_name_is_there_and_others_are_not() -> None:
    assert sorted(package._MODULES) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'load'"):
        _ = package.load
