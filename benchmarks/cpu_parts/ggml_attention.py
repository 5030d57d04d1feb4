"""The flash attention of ggml, which llama.cpp runs, built from a folder of its sources. None of them is kept here.

    pip download --no-deps --no-binary :all: llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    python benchmarks/cpu_attention.py --ggml llama_cpp_python-*/vendor/llama.cpp/ggml

It is built by its own CMake files, for this processor, without OpenMP: its threads beside the first end with each step.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from cpu_parts.step import GQA, HEAD_DIM, NUM_KV_HEADS, Stepper, check_output, num_copies, random_states
from kvtuner.runtime_loader.cpu.library import compiler, library_folder

if TYPE_CHECKING:
    from cpu_parts.step import Requests

BITS_OF_TYPE: Final = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
"""The types of a cache, with the bits of an element: one scale in fp16 for 32 of them."""
TOLERANCES: Final = {"f16": 5e-2, "q8_0": 2e-2, "q4_0": 2e-2}
"""The errors allowed: with f16 it sums values in fp16, and otherwise rounds queries to 8 bits in groups of 32."""
MOST_F16_TOKENS: Final = 4096
"""The most tokens up to which sums in fp16 are checked: their error grows, and was a tenth of the output at 16,384."""
PROGRAM: Final = Path(__file__).with_suffix(".cc")
_POINTER: Final = ctypes.c_void_p
_FLOATS: Final = ctypes.c_void_p


def build_ggml(folder: Path) -> ctypes.CDLL:
    """Build ggml and what calls it from a folder of ggml's sources; once for the sources' folder.

    Raises:
        SystemExit: The folder has no such sources, or a compiler or CMake is missing or fails.
    """
    if not (folder / "include" / "ggml.h").exists():
        raise SystemExit(f"{folder} has no include/ggml.h: --ggml takes the folder ggml of llama.cpp's sources")
    built = library_folder().with_name("ggml-" + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12])
    sources, libraries = built / "sources", built / "build" / "src"
    if not (built / "done").exists():
        shutil.rmtree(built, ignore_errors=True)
        shutil.copytree(folder, sources)
        (sources / "ggml.pc.in").touch()  # CMake asks for it, and the package leaves it out
        options = ("CMAKE_BUILD_TYPE=Release", "GGML_OPENMP=OFF", "GGML_BUILD_TESTS=OFF", "GGML_BUILD_EXAMPLES=OFF")
        _run("cmake", "-S", sources, "-B", built / "build", *(f"-D{option}" for option in options))
        _run("cmake", "--build", built / "build", "--target", "ggml-cpu", "--parallel", "2")
        (built / "done").touch()
    path = built / "attention.so"
    link = [f"-L{libraries}", "-lggml-base", "-lggml-cpu", f"-Wl,-rpath,{libraries}"]
    _run(
        compiler() or "c++",
        "-std=c++17",
        "-O2",
        "-shared",
        "-fPIC",
        "-I",
        sources / "include",
        PROGRAM,
        *link,
        "-o",
        path,
    )
    library = ctypes.CDLL(str(path))
    library.ggml_attention_new.restype = _POINTER
    library.ggml_attention_new.argtypes = [
        ctypes.c_char_p, *[ctypes.c_int64] * 5, ctypes.c_int, ctypes.c_int, _FLOATS, _FLOATS, _FLOATS,
    ]  # fmt: skip
    library.ggml_attention_output.restype = _POINTER
    library.ggml_attention_bytes.restype = ctypes.c_int64
    for function in ("step", "bytes", "output", "free"):
        getattr(library, f"ggml_attention_{function}").argtypes = [_POINTER]
    return library


class GgmlAttention:
    """Attention by ggml over a cache of one type, whose answer is checked before it is timed."""

    def __init__(self, library: ctypes.CDLL, case: Requests, name: str) -> None:
        """Fill as many copies of the cache as no cache of a processor holds."""
        self._library = library
        q = torch.randn(case.batch, NUM_KV_HEADS * GQA, HEAD_DIM)
        k, v = random_states(case).contiguous(), random_states(case).contiguous()
        copies = num_copies(int(2 * k.numel() * BITS_OF_TYPE[name] / 8))
        self._attention = library.ggml_attention_new(
            name.encode(), case.tokens, case.batch, NUM_KV_HEADS, GQA, HEAD_DIM, copies, case.threads,
            q.data_ptr(), k.data_ptr(), v.data_ptr(),
        )  # fmt: skip
        self.num_bytes: int = library.ggml_attention_bytes(self._attention)
        self.step()
        output = torch.frombuffer(
            (ctypes.c_float * q.numel()).from_address(library.ggml_attention_output(self._attention)),
            dtype=torch.float32,
        )
        if name != "f16" or case.tokens <= MOST_F16_TOKENS:
            check_output(f"ggml {name}", output.view(q.shape), q, k, v, TOLERANCES[name])

    def step(self) -> None:
        """Attend once."""
        status = self._library.ggml_attention_step(self._attention)
        assert status == 0, status

    def __del__(self) -> None:
        """Free the copies."""
        self._library.ggml_attention_free(self._attention)


def ggml_steppers(library: ctypes.CDLL, case: Requests) -> dict[str, Stepper]:
    """The steps of every type of cache, by name."""
    attentions = {f"ggml {name}": GgmlAttention(library, case, name) for name in BITS_OF_TYPE}
    return {name: Stepper(attention.num_bytes, attention.step) for name, attention in attentions.items()}


def _run(*command: str | Path) -> None:
    try:
        done = subprocess.run([str(each) for each in command], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SystemExit(f"{command[0]} is not installed: ggml is built with it") from error
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-2000:]}")
