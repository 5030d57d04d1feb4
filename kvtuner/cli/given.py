"""What commands about a finished profile share: the profile, what its search says, and how a result was made."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner import __version__
from kvtuner.bench.server_flags import ServerFlags
from kvtuner.calibration.naming import public_name
from kvtuner.cli.parser import build_parser
from kvtuner.cli.session import model_source, say
from kvtuner.cli.show import profile_files
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.evaluation import Making
from kvtuner.exported_configs.evidence import ModelIdentity
from kvtuner.exported_configs.load import load_profile

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from kvtuner.calibration.model import ModelShape
    from kvtuner.exported_configs.profile import Profile

MAX_SEED: Final = 2**31
MAX_COMMAND: Final = 2000
_PATHS: Final = ("profile", "model", "data", "include_path")
_UNSAID: Final = ("command", "json", "debug", "out", "endpoint", "profile")


def profile_of(text: str) -> tuple[Path, Profile]:
    """The profile that a file or a run folder holds.

    Raises:
        ProfileError: none, several, or one that is wrong.
    """
    files = profile_files(Path(text))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ProfileError(f"{text} holds several profiles; name one of {names}")
    return files[0], load_profile(files[0])


def take_from_profile(args: Namespace, profile: Profile) -> None:
    """What was not said is as the search had it: the model, the corpus's cut and so its unseen part."""
    if args.model is None:
        args.model, args.revision = profile.model.id, args.revision or profile.model.revision
        say(f"no --model given: taking {args.model}{f'@{args.revision}' if args.revision else ''}")
    record = profile.provenance.calibration
    if args.seed is None:
        args.seed = record.seed if record and record.seed < MAX_SEED else 0
    if record is None:
        return
    counts = record.num_sequences
    args.sequence_length = args.sequence_length or record.sequence_length
    if args.sequences is None and min(counts.calibrate, counts.select, counts.report - 1) > 0:
        args.sequences = (counts.calibrate, counts.select, counts.report)
    args.context_length = args.context_length or record.position_range[1] + 1
    if args.data is None and record.corpus != "demo":
        say(f"the search read {record.corpus}; without --data the shipped demo corpus is taken")


def model_record(args: Namespace, shape: ModelShape, dtype: Any) -> ModelIdentity:
    """The model that the flags name, as results say it."""
    return ModelIdentity(
        id=model_source(args).name,
        revision=args.revision,
        config_sha256=shape.config_sha256,
        architecture=shape.architecture,
        dtype=dtype,
    )


def command_said(args: Namespace) -> list[str]:
    """The command with the last parts of paths only: results are made to be shared. Call before flags get defaults."""
    words = ["kvtuner", args.command, public_name(str(args.profile))]
    usual = vars(build_parser().parse_args([args.command, "x"]))
    for name, value in sorted(vars(args).items()):
        if name in _UNSAID or value == usual[name]:
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if name == "server_args":
            text = shlex.join(ServerFlags.parse(text).shared())
        text = public_name(text) if name in _PATHS else text
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    return words + [word for way, _ in args.endpoint or () for word in ("--endpoint", f"{way}=URL")]


def making(said: Sequence[str], args: Namespace, *, device: str | None = None) -> Making:
    """How a result was made.

    Args:
        said: see `command_said`.
        args: device, endpoints and seed.
        device: of servers that were started; None without any.
    """
    import torch
    import transformers

    return Making(
        kvtuner_version=__version__,
        command=shlex.join(said)[:MAX_COMMAND].strip(),
        machine=_machine(args, device),
        torch=torch.__version__,
        transformers=transformers.__version__,
        seed=args.seed,
    )


def _machine(args: Namespace, device: str | None) -> str:
    import torch

    if torch.cuda.is_available() and "cpu" not in (args.device, device) and not args.endpoint:
        index = torch.device(args.device).index if args.device != "auto" else None
        count = torch.cuda.device_count() if args.device == "auto" else 1
        return f"{count} x {torch.cuda.get_device_name(index or 0)}"
    asked = "asked from " if args.endpoint else ""
    return f"{asked}{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
