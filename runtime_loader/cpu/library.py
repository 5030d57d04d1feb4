"""The library in C++: the wheel's, or one that is compiled once into the user's cache folder. Knows no rows."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

import torch

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.cpu.instruction_sets import InstructionSet, runnable_sets
from kvtuner.runtime_loader.cpu.structures import JOBS

COMPILERS: Final = ("c++", "g++", "clang++")
# Nothing may be fused or reordered: rows must be those of quant.py. Products that may be fused ask for it by name.
COMPILER_FLAGS: Final = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fvisibility=hidden",
    "-Wno-psabi", "-shared", "-fPIC",
)  # fmt: skip
SHIPPED: Final = "libraries"
"""The folder beside the sources where a wheel for one platform has its libraries."""
MOST_SECONDS: Final = 300
"""The most seconds that compiling may take; on a core of 2023 it takes ten."""

logger: Final = logging.getLogger("kvtuner")


def compiler() -> str | None:
    """The path of a C++ compiler, that of CXX first; None where there is none."""
    asked = os.environ.get("CXX")
    return next((path for name in (asked, *COMPILERS) if name and (path := shutil.which(name))), None)


def require_native_library() -> None:
    """Refuse by a `ServingError` where no library can be had; otherwise it is ready after this."""
    if sys.byteorder != "little":
        raise ServingError("packed rows are read on little-endian processors alone; use KVTUNER_ATTENTION=torch")
    load_library(runnable_sets()[0].name)


@cache
def load_library(name: str, extra_flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Load the library for an instruction set: the wheel's, or else one that is compiled unless this user has it.

    Raises:
        ServingError: The processor lacks the instructions, there is no compiler, or it fails.
    """
    kind = next((each for each in runnable_sets() if each.name == name), None)
    if kind is None:
        names = ", ".join(each.name for each in runnable_sets())
        raise ServingError(f"this processor does not run {name}; it runs {names}")
    with resources.as_file(resources.files(__package__)) as package:
        shipped = package / SHIPPED / shipped_name(kind, sources_in(package))
        if shipped.exists() and not extra_flags:
            try:
                return _loaded(shipped)
            except ServingError as error:
                logger.warning("kvtuner: the wheel's library is not used: %s", error)
    return _loaded(_compiled(kind, extra_flags))


def is_shipped(library: ctypes.CDLL) -> bool:
    """Whether a library came with the wheel; otherwise this user compiled it."""
    return Path(library._name).parent.name == SHIPPED


def sources_in(package: Path) -> list[Path]:
    """The sources of every library, headers included, in the folder of this package."""
    return sorted((package / "sources").iterdir())


def shipped_name(kind: InstructionSet, sources: list[Path]) -> str:
    """The file name of a wheel's library, which another revision of sources or flags does not have."""
    return f"{kind.name}-{_digest([*COMPILER_FLAGS, *kind.compiler_flags], sources)}.so"


def compile_library(command: list[str], sources: list[Path], path: Path) -> None:
    """Compile a library, which appears whole or not at all; `ServingError` where the compiler fails.

    `command` is the compiler with its flags.
    """
    # Beside the path, so that it takes its place at once or not at all.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        units = [str(file) for file in sources if file.suffix == ".cc"]
        try:
            done = subprocess.run(
                [*command, *units, "-o", str(built)], capture_output=True, text=True, errors="replace",
                timeout=MOST_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise ServingError(f"{command[0]} took more than {MOST_SECONDS} seconds") from error
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
            raise ServingError(f"{command[0]} failed: {' '.join(errors[:1])}; it must know C++17, as g++ 12 does")
        built.replace(path)


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ServingError(f"{path} cannot be loaded: {error}; remove it to compile it again") from error
    sizes = (ctypes.c_int32 * len(JOBS))()
    library.kvtuner_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(job) for job in JOBS]
    return library


def _compiled(kind: InstructionSet, extra_flags: tuple[str, ...]) -> Path:
    path_of_compiler = compiler()
    if path_of_compiler is None:
        raise ServingError("there is no C++ compiler: install g++ 12 or newer, or name one in CXX")
    command = [path_of_compiler, *COMPILER_FLAGS, *kind.compiler_flags, *extra_flags]
    folder = library_folder()
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, errors="replace", check=False)
    with resources.as_file(resources.files(__package__)) as package:
        sources = sources_in(package)
        path = folder / f"{kind.name}-{_digest([*command, version.stdout], sources)}.so"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # One process compiles, and others of this user wait for its file.
            with (folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    logger.info("compiling attention for this processor, once: %s", path)
                    compile_library(command, sources, path)
        except OSError as error:
            raise ServingError(f"{folder} cannot hold the library: {error}; set XDG_CACHE_HOME to a folder") from error
    return path


def _digest(command: list[str], sources: list[Path]) -> str:
    """What a library was made of: the flags, the sources and, where it is known, the compiler."""
    digest = hashlib.sha256("\0".join(command).encode())
    for file in sources:
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:24]


def library_folder() -> Path:
    """The folder of this user's compiled libraries."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtuner" / "cpu"


@cache
def parallel_function() -> int | None:
    """The address of `GOMP_parallel` in the OpenMP runtime that torch runs on; None where it has no such runtime.

    Threads of a second runtime would compete with those of the first, which spin for a while after each of torch's
    loops: that doubles the processor time of two threads.
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Whatever this library depends on is searched, so it is what torch itself calls.
        function = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
