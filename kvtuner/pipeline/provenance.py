"""The provenance of a result: its command and its machine, as they may be shared.

Commands are without the paths of this machine, and without options that have their defaults.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner import __version__
from kvtuner.bench.server import ServerFlags
from kvtuner.exported_configs.identity.model_identity import public_name
from kvtuner.exported_configs.profile.evaluation_record import ResultProvenance
from kvtuner.exported_configs.sharing.reference import FileReference, parse_reference
from kvtuner.pipeline.flags.option_fields import defaults_of, flag_values
from kvtuner.pipeline.options import DEFAULT_SAMPLER, DEFAULT_TRIALS, SearchOptions

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvtuner.pipeline.eval_bench_options import BenchOptions, EvalOptions

MAX_COMMAND: Final = 2000
_PATHS: Final = ("model", "data", "include_path")
# Where a search runs and what else it writes, not what it finds.
_NOT_OF_SEARCHES: Final = ("out", "device", "report", "storage", "budget", "workers", "tp", "stream")


def search_command(options: SearchOptions) -> str:
    """The search that makes a run's profiles again, wherever the same data and model are at hand.

    All budgets are named: what was measured for one guides the search for the others.
    """
    usual = {**defaults_of(SearchOptions), "sampler": DEFAULT_SAMPLER, "trials": DEFAULT_TRIALS}
    command = ["kvtuner", "search", *(["--budget", *options.budget] if options.budget else [])]
    return shlex.join(command + _flags(flag_values(options), usual, left_out=_NOT_OF_SEARCHES))


def shareable_profile(text: str) -> str:
    """The name of a profile: the last part of a file's path; a pin stays."""
    reference = parse_reference(text)
    if not isinstance(reference, FileReference):
        return text
    pin = f"#{reference.digest}" if reference.digest else ""
    path = reference.path
    return (public_name(str(path)) if path.exists() else path.name) + pin


def _flags(values: Mapping[str, Any], usual: Mapping[str, Any], *, left_out: Collection[str]) -> list[str]:
    """Flags in the order of their names, with the last parts of paths only.

    Values are those of `flag_values`; the usual ones, of `defaults_of`, need no flag.
    """
    flags: list[str] = []
    for name, value in sorted(values.items()):
        if name in left_out or value in (None, usual[name]):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            flags += [f"--{flag}", public_name(text) if name in _PATHS else text]
    return flags


def result_command(name: str, options: Any) -> list[str]:
    """The arguments of a command about a profile; the URLs of its servers are left out."""
    values = flag_values(options)
    if server_args := values.get("server_args"):
        values["server_args"] = shlex.join(ServerFlags.parse(server_args).shareable())
    flags = _flags(values, defaults_of(type(options)), left_out=("profile", "endpoint", "out"))
    # Where the servers were is nobody's business: URLs name machines, and may hold keys.
    servers = [word for scheme, _ in options.endpoint or () for word in ("--endpoint", f"{scheme}=URL")]
    return ["kvtuner", name, shareable_profile(str(options.profile)), *flags, *servers]


def result_provenance(
    command: Sequence[str], options: EvalOptions | BenchOptions, server_device: str | None = None
) -> ResultProvenance:
    """The provenance of a result: the command as it may be shared, and the device of a model loaded here or of servers.

    The options are those after the profile's search filled them in; `server_device` is that of servers started here.
    """
    import torch
    import transformers

    # Servers that were there already may be anywhere: this machine only asked them.
    device, has_endpoints = options.model.device, bool(options.endpoint)
    is_on_gpu = torch.cuda.is_available() and "cpu" not in (device, server_device) and not has_endpoints
    asked = "asked from " if has_endpoints else ""
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return ResultProvenance(
        kvtuner_version=__version__,
        command=shlex.join(command)[:MAX_COMMAND].strip(),
        machine=_gpus(device) if is_on_gpu else f"{asked}{_processor()}, {cores}",
        torch=torch.__version__,
        transformers=transformers.__version__,
        seed=options.seed or 0,
    )


def _gpus(device: str) -> str:
    import torch

    index = None if device == "auto" else torch.device(device).index
    count = torch.cuda.device_count() if device == "auto" else 1
    return f"{count} x {torch.cuda.get_device_name(index or 0)}"


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
