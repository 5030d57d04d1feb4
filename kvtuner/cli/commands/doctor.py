"""``kvtuner doctor``: what this machine has, and whether kvtuner can work here."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import kvtuner
from kvtuner.cli.command import Command
from kvtuner.errors import KVTunerError
from kvtuner.report.table import Table

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

OPTIONAL: Final = {
    "accelerate": "models larger than one GPU",
    "lm_eval": "kvtuner eval --tasks",
    "sglang": "serving a profile",
    "triton": "GPU kernels",
}
MIN_FREE_BYTES: Final = 256 << 20
_PYPROJECT: Final = Path(kvtuner.__file__).parents[1] / "pyproject.toml"


class DoctorCheck(NamedTuple):
    """One line of the doctor's report; `status` is ok, note or bad."""

    name: str
    status: str
    detail: str


def _run(args: Namespace) -> int:
    checks = [
        DoctorCheck("python", "ok", platform.python_version()),
        *(_package(name, least) for name, least in needed().items()),
        *(_optional(name, use) for name, use in OPTIONAL.items()),
        _guarded("devices", _devices),
        _guarded("attention hook", _demo_model),
        _guarded("processor attention", _processor_attention),
        _guarded("disk", _disk),
    ]
    if args.json:
        print(json.dumps([check._asdict() for check in checks], indent=1))
    else:
        rows = [(check.status, check.name, check.detail) for check in checks]
        print("\n".join(Table(("", "", ""), rows, left=(0, 1, 2)).lines()))
    return int(any(check.status == "bad" for check in checks))


def needed() -> dict[str, str]:
    """The distributions that kvtuner cannot do without, with the least version; the list of pyproject.toml."""
    try:
        requirements = importlib.metadata.requires("kvtuner") or ()
    except importlib.metadata.PackageNotFoundError:  # a clone that nobody installed
        requirements = tomllib.loads(_PYPROJECT.read_text())["project"]["dependencies"]
    matches = (re.fullmatch(r"([\w.-]+)(?:>=([\d.]+))?", text) for text in requirements)
    return {match[1]: match[2] or "" for match in matches if match is not None}


def _package(name: str, least: str) -> DoctorCheck:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return DoctorCheck(name, "bad", "not installed; reinstall kvtuner")
    if _numbers(version) < _numbers(least):
        return DoctorCheck(name, "bad", f"{version}, but kvtuner needs {least} or newer; upgrade it")
    return DoctorCheck(name, "ok", version)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 5, 0 of ``5.0rc1``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _optional(name: str, use: str) -> DoctorCheck:
    if importlib.util.find_spec(name) is None:
        return DoctorCheck(name, "note", f"not installed; needed for {use}")
    # A module may come from a distribution of another name: triton from triton-windows.
    for distribution in (name, *importlib.metadata.packages_distributions().get(name, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return DoctorCheck(name, "ok", importlib.metadata.version(distribution))
    return DoctorCheck(name, "ok", "importable, version unknown")


def _guarded(name: str, check: Callable[[], DoctorCheck]) -> DoctorCheck:
    try:
        return check()
    except (KVTunerError, ImportError, OSError, RuntimeError) as error:
        return DoctorCheck(name, "bad", " ".join(str(error).split()))


def _devices() -> DoctorCheck:
    import torch

    if not torch.cuda.is_available():
        return DoctorCheck("devices", "note", f"no GPU; {torch.get_num_threads()} CPU threads")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return DoctorCheck("devices", "ok", ", ".join(names))


def _demo_model() -> DoctorCheck:
    from kvtuner.calibration.forward.chain import DecoderChain
    from kvtuner.calibration.model_loading import ModelSource, load_model
    from kvtuner.exported_configs.identity.model_identity import DEMO

    loaded = load_model(ModelSource(DEMO, device="cpu"))
    chain = DecoderChain(loaded.model, loaded.shape.cache)
    detail = f"demo model loads, {len(chain.layers)} layers seen through transformers"
    return DoctorCheck("attention hook", "ok", detail)


def _processor_attention() -> DoctorCheck:
    """What attends over packed rows where a server runs on this processor; the library is compiled if it is not yet."""
    import torch

    from kvtuner.runtime_loader.attention_backends import BACKEND_VARIABLE, backend_for
    from kvtuner.runtime_loader.cpu import BACKEND
    from kvtuner.runtime_loader.cpu.instruction_sets import runnable_sets
    from kvtuner.runtime_loader.cpu.library import is_shipped, load_library, require_native_library

    chosen = backend_for(torch.device("cpu"), os.environ.get(BACKEND_VARIABLE) or None).name
    if chosen == BACKEND:
        best = runnable_sets()[0].name
        origin = "shipped with the wheel" if is_shipped(load_library(best)) else "compiled on this machine"
        return DoctorCheck("processor attention", "ok", f"{chosen}: C++ for {best}, {origin}")
    try:
        require_native_library()
    except KVTunerError as error:
        return DoctorCheck("processor attention", "note", f"{chosen}, which is slower: {error}")
    return DoctorCheck("processor attention", "note", f"{chosen}, by {BACKEND_VARIABLE}; {BACKEND} runs here too")


def _disk() -> DoctorCheck:
    free = shutil.disk_usage(Path.cwd()).free
    status = "ok" if free >= MIN_FREE_BYTES else "bad"
    return DoctorCheck("disk", status, f"{free / (1 << 30):.1f} GiB free in the current folder")


COMMANDS: Final = (Command("doctor", "what this machine has, and whether kvtuner can work here", lambda _: None, _run),)
