"""Runs a Linux program on an emulated processor with tiles (AMX): Bochs, a kernel of Debian and the program's files.

The kernel is laid into memory with its parameters, as Linux's boot protocol (Documentation/arch/x86/boot.rst) asks, so
that there is neither a BIOS nor a boot loader nor a disk. Knows nothing of attention.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

from tools.amx import bochs
from tools.amx.debian import fetch_package

MIB: Final = 1 << 20
MEMORY: Final = 512 * MIB
PARAMETERS: Final = 0x10000
COMMAND_LINE: Final = 0x11000
KERNEL: Final = 0x100000
FILES: Final = 256 * MIB
"""The place of the files in memory, above what a kernel takes to unpack itself."""
ARGUMENTS: Final = "console=ttyS0 quiet acpi=off noapic nolapic pci=off mitigations=off nokaslr panic=-1"
ENDED: Final = "the emulated program ended with "

_CONFIGURATION: Final = """\
cpu: model=sapphire_rapids, ips=200000000, reset_on_triple_fault=0, ignore_bad_msrs=1
memory: guest={megabytes}, host={megabytes}
romimage: file={work}/start.bin
vgaromimage: file={bios}/vgabios-cirrus.bin-1.13.0
optramimage1: file={work}/parameters, address={parameters:#x}
optramimage2: file={work}/kernel, address={kernel:#x}
optramimage3: file={work}/files, address={files:#x}
com1: enabled=1, mode=file, dev={work}/console
display_library: nogui
log: {work}/log
panic: action=fatal
error: action=ignore
info: action=ignore
clock: sync=none
"""


class MachineError(Exception):
    """A machine that did not get as far as its program's end."""


def missing() -> str | None:
    """What keeps a machine from running here; None where nothing does."""
    if not bochs.program().exists():
        return "there is no Bochs with tiles: python -m tools.amx.bochs builds it"
    return next((f"there is no {name}" for name in ("gcc", "objcopy") if shutil.which(name) is None), None)


def run(files: dict[str, bytes], seconds: float) -> str:
    """What the program /main, a script of busybox's shell among the files, prints in at most so many seconds.

    `files` are by absolute path, and all may be executed.

    Raises:
        MachineError: The machine ends, or takes longer, before the program has ended with 0.
    """
    kernel, shell = _kernel_and_shell()
    init = f"#!/bin/busybox sh\n/bin/busybox mount -t proc proc /proc\n/bin/busybox sh /main\necho {ENDED}$?\n"
    init += "while :; do /bin/busybox sleep 9; done\n"  # Linux would not survive the end of its first program.
    everything = {**files, "/bin/busybox": shell, "/init": init.encode()}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        archive = archive_of(everything)
        (work / "files").write_bytes(archive)
        (work / "kernel").write_bytes(kernel[512 * (kernel[0x1F1] + 1) :])  # what follows the code for real mode
        (work / "parameters").write_bytes(parameters_of(kernel, len(archive)))
        subprocess.run(["gcc", "-c", str(Path(__file__).with_name("start.S")), "-o", str(work / "start.o")], check=True)
        subprocess.run(["objcopy", "-O", "binary", "-j", ".text", "start.o", "start.bin"], cwd=work, check=True)
        configuration = _CONFIGURATION.format(
            megabytes=MEMORY // MIB, work=work, bios=bochs.folder() / "bios", parameters=PARAMETERS, kernel=KERNEL,
            files=FILES,
        )  # fmt: skip
        (work / "configuration").write_text(configuration, encoding="utf-8")
        return _output(work, seconds)


def _output(work: Path, seconds: float) -> str:
    command = [str(bochs.program()), "-q", "-f", str(work / "configuration")]
    console, deadline, text = work / "console", time.monotonic() + seconds, ""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while ENDED not in text.rpartition("\n")[0]:
            if process.poll() is not None or time.monotonic() > deadline:
                cause = "took too long" if process.returncode is None else "stopped"
                raise MachineError(f"the emulated machine {cause}; it printed: {text[-2000:]}")
            time.sleep(0.5)
            text = console.read_text(encoding="utf-8", errors="replace") if console.exists() else ""
    finally:
        process.kill()
        process.wait()
    printed, _, status = text.replace("\r", "").partition(ENDED)
    if status.split()[0] != "0":
        raise MachineError(f"{ENDED}{status.split()[0]}; it printed: {printed[-2000:]}")
    return printed


def with_libraries(programs: dict[str, Path]) -> dict[str, bytes]:
    """Programs and shared objects by their paths on the machine, and the libraries of this one that they need."""
    files = {path: file.read_bytes() for path, file in programs.items()}
    for file in programs.values():
        listing = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=True).stdout
        files |= {path: Path(path).read_bytes() for path in re.findall(r"(/\S+) \(0x", listing)}
    return files


def archive_of(files: dict[str, bytes]) -> bytes:
    """The files, their folders and a console as the archive (cpio, newc) that Linux unpacks at its start."""
    folders = {str(parent) for path in files for parent in Path(path).parents} | {"/dev", "/proc", "/tmp"}
    entries = [(folder, 0o040755, 0, b"") for folder in sorted(folders - {"/"})]
    entries.append(("/dev/console", 0o020600, 5 << 8 | 1, b""))
    entries += [(path, 0o100755, 0, data) for path, data in files.items()]
    archive = bytearray()
    for number, (path, mode, device, data) in enumerate([*entries, ("/TRAILER!!!", 0, 0, b"")], start=1):
        name = path[1:].encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, device >> 8, device & 255, len(name), 0)
        archive += b"070701" + b"".join(b"%08X" % field for field in fields)
        for part in (name, data):
            archive += part
            archive += bytes(-len(archive) % 4)
    return bytes(archive)


def parameters_of(kernel: bytes, size_of_files: int) -> bytes:
    """The page of parameters that a kernel (bzImage) is started with, and its command line in the next."""
    page, end = bytearray(COMMAND_LINE - PARAMETERS), 0x202 + kernel[0x201]
    page[0x1F1:end] = kernel[0x1F1:end]
    page[0x210] = 0xFF  # a boot loader without a number
    struct.pack_into("<II", page, 0x218, FILES, size_of_files)
    struct.pack_into("<I", page, 0x228, COMMAND_LINE)
    memory = ((0, 0xA0000), (MIB, MEMORY - MIB))  # but for the place of a screen and a BIOS
    page[0x1E8] = len(memory)
    for index, (start, size) in enumerate(memory):
        struct.pack_into("<QQI", page, 0x2D0 + 20 * index, start, size, 1)
    return bytes(page) + ARGUMENTS.encode() + b"\0"


def _kernel_and_shell() -> tuple[bytes, bytes]:
    """Debian's newest kernel for virtual machines, and busybox; fetched once, and kept."""
    folder = bochs.cache()
    kernel, shell = folder / "vmlinuz", folder / "busybox"
    if not kernel.exists() or not shell.exists():
        name, of_kernel = fetch_package(r"linux-image-[\d.]+\+deb\d+-cloud-amd64", folder)
        _, of_shell = fetch_package("busybox-static", folder)
        for file, package, member in (
            (kernel, of_kernel, f"./boot/vmlinuz-{name.removeprefix('linux-image-')}"),
            (shell, of_shell, "./usr/bin/busybox"),
        ):
            data = package.extractfile(member)
            assert data is not None
            part = file.with_name(f"{file.name}.part")
            part.write_bytes(data.read())
            part.replace(file)
    return kernel.read_bytes(), shell.read_bytes()
