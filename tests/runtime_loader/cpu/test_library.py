"""The library is compiled once for a user, by several processes at once or not, and refused in one line otherwise."""

from __future__ import annotations

import ctypes
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.cpu import library
from kvtuner.runtime_loader.cpu.instruction_sets import INSTRUCTION_SETS, runnable_sets
from kvtuner.runtime_loader.cpu.library import compiler, load_library, parallel_function

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo "a compiler 1.0"; exit 0; }
for last; do :; done
sleep 0.2
echo made >> %s
cp %s "$last"
"""
"""A compiler that leaves a line for each call, and takes its library from another file."""


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A user who has compiled nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_library.cache_clear()
    yield tmp_path
    load_library.cache_clear()


def fake_compiler(folder: Path, text: str) -> Path:
    path = folder / "fake++"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
def test_of_several_processes_one_compiles(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the library is that of this user
    built = load_library("generic")._name
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache / "cache"))
    monkeypatch.setenv("CXX", str(fake_compiler(own_cache, COMPILER % (own_cache / "calls", built))))
    program = "from kvtuner.runtime_loader.cpu.library import load_library; load_library('generic')"
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (own_cache / "calls").read_text() == "made\n"
    assert sorted(path.suffix for path in library.library_folder().iterdir()) == ["", ".so"]  # and the lock


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (
            "#!/bin/sh\necho 'x.cc:1: error: no such option' >&2; exit 1\n",
            "fake.. failed: x.cc:1: error: no such option",
        ),
        ('#!/bin/sh\nfor last; do :; done\n[ "$last" = --version ] || echo junk > "$last"\n', "cannot be loaded"),
    ],
)
def test_a_compiler_that_fails_is_refused_in_one_line(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, text: str, refusal: str
) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(own_cache, text)))
    with pytest.raises(ServingError, match=refusal) as refused:
        load_library("generic")
    assert "\n" not in str(refused.value)


def test_a_cache_folder_that_cannot_be_written_is_refused(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache / "file"))
    monkeypatch.setenv("CXX", str(fake_compiler(own_cache, "#!/bin/sh\n")))
    with pytest.raises(ServingError, match=r"cannot hold the library: .*; set XDG_CACHE_HOME"):
        load_library("generic")


def test_instructions_that_the_processor_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "runnable_sets", lambda: INSTRUCTION_SETS[-1:])
    with pytest.raises(ServingError, match="this processor does not run avx512; it runs generic"):
        load_library("avx512", ("-DNOT_CACHED",))


def test_a_processor_runs_what_it_needs_no_flags_for() -> None:
    assert runnable_sets()[-1].name == "generic"
    assert [kind for kind in INSTRUCTION_SETS if kind in runnable_sets()] == list(runnable_sets())


@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info(), reason="this torch has no OpenMP")
def test_threads_are_those_of_the_runtime_that_torch_runs_on() -> None:
    torch.set_num_threads(2)
    torch.ones(1 << 20).add(1)
    before = threading_tasks()
    address = parallel_function()
    assert address is not None
    seen = set()
    entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    worker = entry(lambda _: seen.add(threading.get_native_id()))
    parallel = ctypes.CFUNCTYPE(None, entry, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(address)
    parallel(worker, None, 2, 0)
    assert len(seen) == 2
    assert threading_tasks() == before, "a second runtime started threads of its own"


def threading_tasks() -> set[str]:
    """The threads of this process, those that no Python started included."""
    return {path.name for path in Path("/proc/self/task").iterdir()}
