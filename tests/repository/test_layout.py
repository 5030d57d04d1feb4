"""The folders, their links, pyproject.toml and the built wheel name the same packages."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from typing import TYPE_CHECKING, Any

import pytest
from wheels.built_wheel import LINKED_FOLDERS, PACKAGE_FOLDERS, ROOT, build_wheel

if TYPE_CHECKING:
    from pathlib import Path

DATA_SUFFIXES = {".html", ".json", ".jsonl", ".txt", ".safetensors", ".cc", ".h"}
DEMO_MODEL = ROOT / "calibration" / "demo" / "model"


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def installed_path(path: Path) -> str:
    """The path in the wheel of a file in a package folder: calibration/x.py is kvtuner/calibration/x.py."""
    relative = path.relative_to(ROOT).as_posix()
    return relative if relative.startswith("kvtuner/") else f"kvtuner/{relative}"


def package_files() -> list[Path]:
    """Every file of the package folders once: rglob does not enter the links."""
    return [
        path
        for folder in PACKAGE_FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> list[str]:
    """Names in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_every_folder_with_an_init_is_a_listed_package() -> None:
    found = {
        installed_path(path).removesuffix("/__init__.py").replace("/", ".")
        for path in package_files()
        if path.name == "__init__.py"
    }
    assert sorted(found) == pyproject()["tool"]["setuptools"]["packages"]


def test_every_top_level_folder_is_mapped_and_linked() -> None:
    mapped = pyproject()["tool"]["setuptools"]["package-dir"]
    assert mapped == {"kvtuner": "kvtuner"} | {f"kvtuner.{name}": name for name in LINKED_FOLDERS}
    links = {path.name: str(path.readlink()) for path in (ROOT / "kvtuner").iterdir() if path.is_symlink()}
    assert links == {name: f"../{name}" for name in LINKED_FOLDERS}


def test_requirements_dev_is_the_dev_dependency_group() -> None:
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    assert lines == pyproject()["dependency-groups"]["dev"]


def test_import_of_kvtuner_loads_no_heavy_package() -> None:
    program = "import sys, kvtuner; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "optuna", "datasets"} & set(done.stdout.split())


@pytest.mark.slow
def test_wheel_installs_only_the_name_kvtuner(wheel_names: list[str]) -> None:
    top_level = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"kvtuner"}


@pytest.mark.slow
def test_wheel_holds_every_module_and_data_file_once(wheel_names: list[str]) -> None:
    expected = {
        installed_path(path)
        for path in package_files()
        if path.suffix in DATA_SUFFIXES | {".py"} or path.name == "py.typed" or DEMO_MODEL in path.parents
    }
    installed = [name for name in wheel_names if name.startswith("kvtuner/")]
    assert sorted(installed) == sorted(expected)


@pytest.mark.slow
def test_wheel_says_whose_it_is_what_for_and_how_far(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    known = metadata.get_all("Classifier", [])
    assert metadata["Author"] == "The KVTuner maintainers" and "kv-cache" in metadata["Keywords"].split(",")
    assert {"Development Status :: 3 - Alpha", "Typing :: Typed", "Operating System :: POSIX :: Linux"} < set(known)
    versions = {text.rpartition(" ")[2] for text in known if re.fullmatch(r".*:: Python :: 3\.\d+", text)}
    assert min(versions) == metadata["Requires-Python"].removeprefix(">=")
    assert not [text for text in known if text.startswith("License ::")], "beside an expression of licenses"


@pytest.mark.slow
def test_wheel_holds_the_licenses(wheel_names: list[str]) -> None:
    licenses = {name.split("/licenses/")[1] for name in wheel_names if "/licenses/" in name}
    assert licenses == {"LICENSE", "NOTICE", "LICENSES/PSF-2.0.txt"}
