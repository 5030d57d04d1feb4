"""Flags that several commands have. Defaults are those of kvtuner/pipeline/options.py."""

from __future__ import annotations

import argparse
from typing import Any, Final

from kvtuner.cli import flag_types
from kvtuner.pipeline.options import DataOptions, ModelOptions, defaults_of

PROFILE_HELP: Final = (
    "profile.json, run folder, owner/name[@revision][:path] of the hub, or catalogue:name; #sha256:... pins"
)
_MODEL: Final = defaults_of(ModelOptions)
_DATA: Final = defaults_of(DataOptions)


def add_switch(group: argparse._ActionsContainer, flag: str, text: str, *, default: bool = False) -> None:
    """Add a flag that ``--no-`` turns off, be it on by default or by the YAML file."""
    group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add what `ModelOptions` holds."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="ID|FOLDER|demo", help="hub id, local folder, or the shipped demo model")
    group.add_argument("--revision", help="commit, tag or branch on the hub")
    group.add_argument("--device", default=_MODEL["device"], help="auto (every GPU, else the CPU), cpu, cuda, cuda:N")
    group.add_argument("--dtype", default=_MODEL["dtype"], help="auto, float32, float16 or bfloat16")
    add_switch(group, "--trust-remote-code", "run code that comes with the checkpoint")
    group.add_argument(
        "--context-length",
        type=flag_types.positive,
        metavar="TOKENS",
        help="what will be served; the model's maximum by default",
    )


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add what `DataOptions` holds."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        metavar="FILE|FOLDER|ID[@REV]",
        help="text, JSONL with text or messages, or a datasets id; a shipped demo corpus by default",
    )
    group.add_argument("--data-config", help="configuration of the datasets id")
    group.add_argument("--data-split", default=_DATA["data_split"], help="split of the datasets id")
    group.add_argument("--text-field", default=_DATA["text_field"], help="field that holds the text")
    group.add_argument(
        "--sequence-length",
        type=flag_types.positive,
        metavar="TOKENS",
        help="512 for demo, else 2048 or the context if that is less",
    )
    group.add_argument(
        "--sequences",
        type=flag_types.sequences,
        metavar="N[,N,N]",
        help="sequences to calibrate, select and report on; 4,12,12 for demo, else 8,8,16",
    )
    add_switch(group, "--deduplicate", "drop repeated documents instead of refusing them")


def add_profile(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    """Add the argument that names a profile: a file, a run folder, a profile of the hub or one of the catalogue."""
    parser.add_argument(name, **{"metavar": "PROFILE", "help": PROFILE_HELP, **settings})
