"""The emulator Bochs 3.0, built from Debian's source with what a Linux program with tiles (AMX) needs of it.

    python -m tools.amx.bochs

compiles it into `folder()` once, in about two minutes of processor time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from tools.amx.debian import fetch

SOURCE: Final = "pool/main/b/bochs/bochs_3.0+dfsg.orig.tar.xz"
SOURCE_SHA256: Final = "78f6c73d4a6472d5130a87ab9dc306d02c7c71ed8e25b3a8ef642e2a7acd282b"
OPTIONS: Final = (
    "--enable-cpu-level=6", "--enable-x86-64", "--enable-avx", "--enable-evex", "--enable-amx", "--with-nogui",
    "--enable-repeat-speedups", "--enable-fast-function-calls", "--enable-handlers-chaining", "--disable-show-ips",
    "--disable-docbook", "--disable-gameport",
)  # fmt: skip
NEEDED: Final = ("gcc", "g++", "make", "objcopy")

_DISABLED: Final = """
  if (BX_CPU_THIS_PTR msr.ia32_xfd & BX_XCR0_XTILEDATA_MASK) {
    BX_CPU_THIS_PTR msr.ia32_xfd_err |= BX_XCR0_XTILEDATA_MASK;
    exception(BX_NM_EXCEPTION, 0);
  }
"""
EDITS: Final = (
    # Linux offers tiles only where "extended feature disable" (XFD) exists: two registers, their bits of CPUID, and an
    # exception at the first use of a tile, at which Linux makes room for tiles in what it saves of a program.
    ("cpu/cpu.h", "  Bit64u ia32_xss;", "  Bit64u ia32_xss, ia32_xfd, ia32_xfd_err;"),
    ("cpu/init.cc", "msr.ia32_xss = 0;",
     "msr.ia32_xss = BX_CPU_THIS_PTR msr.ia32_xfd = BX_CPU_THIS_PTR msr.ia32_xfd_err = 0;"),
    ("cpu/cpuid.cc", "leaf->eax |= (1<<3);\n\n    // EBX[31", "leaf->eax |= (1<<3) | (1<<4);\n\n    // EBX[31"),
    ("cpu/cpuid.cc", "ia32_xss_suppmask & (1 << subfunction)) != 0;",
     "ia32_xss_suppmask & (1 << subfunction)) != 0 | (subfunction == 18) << 2;"),
    ("cpu/msr.cc", "::rdmsr(Bit32u index, Bit64u *msr)\n{", "::rdmsr(Bit32u index, Bit64u *msr)\n{"
     "\n  if (index == 0x1c4) return *msr = BX_CPU_THIS_PTR msr.ia32_xfd, true;"
     "\n  if (index == 0x1c5) return *msr = BX_CPU_THIS_PTR msr.ia32_xfd_err, true;"),
    ("cpu/msr.cc", "::wrmsr(Bit32u index, Bit64u val_64)\n{", "::wrmsr(Bit32u index, Bit64u val_64)\n{"
     "\n  if (index == 0x1c4) return BX_CPU_THIS_PTR msr.ia32_xfd = val_64, true;"
     "\n  if (index == 0x1c5) return BX_CPU_THIS_PTR msr.ia32_xfd_err = val_64, true;"),
    ("cpu/avx/amx.cc", "unsigned tile_num)\n{", "unsigned tile_num)\n{" + _DISABLED),
    ("cpu/avx/amx.cc", "::TILEZERO_Tnnn(bxInstruction_c *i)\n{", "::TILEZERO_Tnnn(bxInstruction_c *i)\n{" + _DISABLED),
    # Storing the shapes of tiles has VEX.W of 0.
    ("cpu/decoder/fetchdecode_opmap_avx.cc",
     "ATTR_VEX_W1 | ATTR_VL128 | ATTR_MOD_MEM | ATTR_IS64, BX_IA_STTILECFG",
     "ATTR_VEX_W0 | ATTR_VL128 | ATTR_MOD_MEM | ATTR_IS64, BX_IA_STTILECFG"),
    # A signed byte was converted from an unsigned one, and so never negative.
    ("cpu/avx/amx.cc", "Bit32s(xbyte[", "Bit32s((Bit8s)xbyte["),
    ("cpu/avx/amx.cc", "Bit32s(ybyte[", "Bit32s((Bit8s)ybyte["),
    # Tiles that were saved and restored: shapes had rows and bytes of a row exchanged, the last eight rows were left
    # out, and tiles counted as in use where none was.
    ("cpu/xsave.cc", "tilecfg.vmm16u(8+n)    = BX_CPU_THIS_PTR amx->tilecfg[n].rows",
     "tilecfg.vmm16u(8+n) = BX_CPU_THIS_PTR amx->tilecfg[n].bytes_per_row"),
    ("cpu/xsave.cc", "tilecfg.vmmubyte(48+n) = BX_CPU_THIS_PTR amx->tilecfg[n].bytes_per_row",
     "tilecfg.vmmubyte(48+n) = BX_CPU_THIS_PTR amx->tilecfg[n].rows"),
    ("cpu/xsave.cc", "row < BX_TILE_REGISTERS", "row < BX_TILE_MAX_ROWS"),
    ("cpu/xsave.cc", "tile_use_tracker == 0", "tile_use_tracker != 0"),
    # Decoded instructions are found again by lines of 128 bytes; the mode's bit of tiles, 128, moved them to another
    # line than that which a write to code clears.
    ("cpu/icache.h", "(BxICacheEntries-1)) ^ fetchModeMask;\n  }",
     "(BxICacheEntries-1)) ^ (fetchModeMask & 127);\n  }"),
    # Guest memory is in blocks: a file that is laid into it was read into the first of them whole.
    ("memory/misc_mem.cc", "get_vector(offset), size);\n    if (ret <= 0) {\n      BX_PANIC((\"RAM",
     "get_vector(offset), size < 4096 ? size : 4096);\n    if (ret <= 0) {\n      BX_PANIC((\"RAM"),
)  # fmt: skip
"""What is changed in a file: the text, which must occur, and what takes its place wherever it does."""


def cache() -> Path:
    """The user's cache folder for all that this package fetches and builds."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvtuner" / "amx"


def folder() -> Path:
    """The folder of the built emulator, which another set of edits or options does not have."""
    return cache() / f"bochs-{hashlib.sha256(repr((SOURCE_SHA256, OPTIONS, EDITS)).encode()).hexdigest()[:12]}"


def program() -> Path:
    """The path of the emulator, which is there once it is built."""
    return folder() / "bochs"


def build() -> Path:
    """Build the emulator unless it is there; `OSError` or `CalledProcessError` where that fails."""
    if not program().exists():
        for name in NEEDED:
            if shutil.which(name) is None:
                raise OSError(f"there is no {name}: apt install g++ make binutils")
        part = folder().with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        with tarfile.open(fetch(SOURCE, SOURCE_SHA256, cache())) as source:
            source.extractall(part, filter="data")
        (tree,) = part.iterdir() if not (part / "configure").exists() else (part,)
        for name, old, new in EDITS:
            text = (tree / name).read_text(encoding="latin-1")
            assert old in text, (name, old)
            (tree / name).write_text(text.replace(old, new), encoding="latin-1")
        # Without debug information.
        flags = {"CFLAGS": "-O3 -w", "CXXFLAGS": "-O3 -w"}
        for command in (["./configure", *OPTIONS], ["make", f"-j{os.cpu_count()}"]):
            subprocess.run(command, cwd=tree, env={**os.environ, **flags}, stdout=subprocess.DEVNULL, check=True)
        tree.replace(folder())
        shutil.rmtree(part, ignore_errors=True)
    return program()


if __name__ == "__main__":
    try:
        print(build())
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
