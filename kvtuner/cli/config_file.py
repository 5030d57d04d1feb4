"""The YAML file that ``--config`` names: flags by name, which the command line overlays."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

_PATHS: Final = ("model", "data", "out")


def apply_config_file(command: argparse.ArgumentParser, path: Path, *, keep_budget: bool) -> None:
    """Make the file's values the defaults of a command; a value that is wrong ends the process with status 2.

    Args:
        command: The parser of the command.
        path: The file.
        keep_budget: Whether the file's budgets count; beside ``--budget`` they would be added to its list.
    """
    values = _read(command, path)
    known = {action.dest: action for action in command._actions if action.dest not in ("help", "config")}
    for key, value in values.items():
        action = known.get(str(key).replace("-", "_"))
        if action is None:
            command.error(f"--config {path}: unknown flag {key!r}; known: {', '.join(sorted(known))}")
        if value is None:  # the flag's default, as if the line were absent
            continue
        if action.dest != "budget" or keep_budget:
            command.set_defaults(**{action.dest: _value(command, action, key, value, path)})


def _read(command: argparse.ArgumentParser, path: Path) -> dict[Any, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        command.error(f"cannot read --config {path}: {error.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        command.error(f"--config {path} is not YAML: {' '.join(str(error).split())}")
    if values is not None and not isinstance(values, dict):
        command.error(f"--config {path} must map flag names to values")
    return values or {}


def _value(command: argparse.ArgumentParser, action: argparse.Action, key: Any, value: Any, path: Path) -> Any:
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            command.error(f"--config {path}: {key} must be true or false, not {value!r}")
        return value
    if action.dest == "budget":
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    text = ",".join(str(item) for item in value) if isinstance(value, list) else str(value)
    if action.dest in _PATHS:
        text = os.path.expanduser(text)  # a shell does it for flags
    if action.choices is not None and text not in action.choices:
        command.error(f"--config {path}: {key}: {text!r} is none of {', '.join(map(str, action.choices))}")
    try:
        return command._get_value(action, text)
    except (argparse.ArgumentError, argparse.ArgumentTypeError, ValueError) as error:
        command.error(f"--config {path}: {key}: {error}")
