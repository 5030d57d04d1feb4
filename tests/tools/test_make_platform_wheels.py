"""A wheel for one kind of machine attends where there is no compiler, by libraries of its own sources alone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from wheels.built_wheel import build_wheel

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.cpu.instruction_sets import runnable_sets
from tools.make_platform_wheels import MACHINES, compiler_for, make_wheel

PROGRAM = Path(__file__).with_name("installed_wheel_program.py")
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
"""The numbers of machines in the header of an ELF file, from the specification of ELF."""


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for every platform."""
    return build_wheel(tmp_path_factory.mktemp("pure"))


def wheel_for(machine: str, pure: Path, out: Path) -> Path:
    if compiler_for(machine) is None:
        pytest.skip(f"there is no {machine}-linux-gnu-g++")
    return make_wheel(pure, machine, out)


@pytest.mark.full
@pytest.mark.parametrize("machine", MACHINES)
def test_a_wheel_has_every_file_of_the_pure_one_and_a_library_for_each_instruction_set(
    machine: str, pure_wheel: Path, tmp_path: Path
) -> None:
    built = wheel_for(machine, pure_wheel, tmp_path)
    assert built.name.startswith(f"{pure_wheel.name.removesuffix('any.whl')}manylinux_2_")
    assert built.name.endswith(f"_{machine}.whl")
    with zipfile.ZipFile(pure_wheel) as archive:
        before = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(built) as archive:
        after = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    libraries = {Path(name).name: data for name, data in after.items() if "/cpu/libraries/" in name}
    expected = {"x86_64": ["amx", "avx2", "avx512", "generic"], "aarch64": ["neon"]}[machine]
    assert sorted(name.partition("-")[0] for name in libraries) == expected
    for data in libraries.values():
        assert data[:4] == b"\x7fELF" and int.from_bytes(data[18:20], "little") == ELF_MACHINES[machine]
        assert b"libstdc++" not in data, "a library needs that of C++"
    kept = {name: data for name, data in after.items() if "/cpu/libraries/" not in name}
    assert {name for name in before if not name.endswith(("/WHEEL", "/RECORD"))} <= set(kept)
    assert all(kept[name] == data for name, data in before.items() if not name.endswith(("/WHEEL", "/RECORD")))
    (description,) = (message_from_bytes(data) for name, data in after.items() if name.endswith("/WHEEL"))
    assert description["Root-Is-Purelib"] == "false"
    assert {tag.rpartition("-")[0] for tag in description.get_all("Tag", [])} == {"py3-none"}


@pytest.mark.full
def test_an_installed_wheel_attends_without_a_compiler_unless_its_sources_are_others(
    pure_wheel: Path, tmp_path: Path
) -> None:
    built = wheel_for(platform.machine(), pure_wheel, tmp_path)
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(built)], check=True, capture_output=True)
    # torch is that of these tests; an editable install of kvtuner beside it is not found by such a line.
    (site,) = (tmp_path / "venv" / "lib").glob("python3.*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX")}
    environment = {**kept, "PATH": str(python.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    done = run(str(PROGRAM))
    assert done.returncode == 0, done.stderr
    name, path = done.stdout.split()
    assert name == runnable_sets()[0].name and Path(path).parent == site / "kvtuner/runtime_loader/cpu/libraries"
    assert f"C++ for {name}, shipped with the wheel" in run("-m", "kvtuner", "doctor").stdout
    with (site / "kvtuner/runtime_loader/cpu/sources/codes.h").open("a") as source:
        source.write("// another revision\n")
    done = run(str(PROGRAM))
    assert done.stdout == "torch\n" and done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "attention is" in line]
    assert line.endswith(
        "attention is torch and not cpu: there is no C++ compiler: install g++ 12 or newer, or name one in CXX"
    )
    assert not (tmp_path / "cache").exists()


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tools.make_platform_wheels import compile_libraries

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServingError, match=r"there is no aarch64-linux-gnu-g\+\+: install g\+\+-aarch64-linux-gnu"):
        compile_libraries(tmp_path, "aarch64")
