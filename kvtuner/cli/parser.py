"""The parser of the command line, out of what each command says of itself, and the YAML file of ``--config``.

Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import difflib
import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvtuner import __version__
from kvtuner.cli.command import Command, add_switch
from kvtuner.cli.commands import (
    diff,
    doctor,
    eval_bench,
    generate,
    import_export,
    list_,
    plan,
    push_pull,
    search_calibrate,
    serve_local,
    show_report,
    sign_verify,
    validate,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MODULES: Final = (
    plan,
    search_calibrate,
    eval_bench,
    generate,
    serve_local,
    show_report,
    validate,
    diff,
    list_,
    push_pull,
    import_export,
    sign_verify,
    doctor,
)
COMMANDS: Final[dict[str, Command]] = {
    command.name: command for command in chain.from_iterable(module.COMMANDS for module in _MODULES)
}
"""Every command by its name, in the order of the help. A new one stands in `COMMANDS` of a module of this list."""
_MODEL_EXAMPLES: Final = {"plan": " --gpu H100", "search": " --budget 4bit", "calibrate": ""}
"""What stands behind the model in an example of a command that needs one."""
_PATHS: Final = ("model", "data", "out")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None, off and nothing, and of a switch that is off the flag alone that turns it on."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction) and not action.default:
            return action.option_strings[0]
        return super()._format_action_invocation(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # 0 and 0.0 equal False, but are defaults to show.
        if action.default is False or action.default in (None, argparse.SUPPRESS, [], ""):
            return action.help
        return super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, as everything else does; the flags are in ``--help``."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def refuse_unknown(self, word: str, what: str, known: Iterable[str]) -> NoReturn:
        """End with the known word that is most like an unknown one, if any is."""
        near = difflib.get_close_matches(word, list(known), n=1)
        self.error(f"there is no {what} {word!r}" + (f" (did you mean {near[0]}?)" if near else ""))


def build_parser() -> _Parser:
    """Build the parser of the whole command line."""
    parser = _Parser(
        prog="kvtuner",
        description="Per-layer mixed-precision KV caches: measure, search, prove, share.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvtuner {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS.values():
        sub_parser = commands.add_parser(
            command.name,
            help=command.summary,
            description=command.summary,
            formatter_class=_Help,
            allow_abbrev=False,  # a new flag must not change what an abbreviation means
        )
        command.add_flags(sub_parser)
        add_switch(sub_parser, "--json", "print the result as JSON on stdout")
        add_switch(sub_parser, "--debug", "print a traceback instead of one line")
    return parser


def parse(parser: _Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse flags over the YAML file that ``--config`` names, if any; argparse exits with 2 on a bad flag."""
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.refuse_unknown(argv[0], "command", COMMANDS)
    args, unknown = parser.parse_known_args(argv)
    if args.command is None:
        return parser.parse_args(argv)
    command = _sub_parser(parser, args.command)
    if unknown:
        command.refuse_unknown(unknown[0].partition("=")[0], "flag or argument", command._option_string_actions)
    if getattr(args, "config", None):
        _apply_config_file(command, Path(args.config), keep_budget=not getattr(args, "budget", None))
        args = parser.parse_args(argv)
    if args.command in _MODEL_EXAMPLES and not args.model:
        example = f"kvtuner {args.command} --model Qwen/Qwen2.5-7B-Instruct{_MODEL_EXAMPLES[args.command]}"
        command.error(f"give --model, as in: {example}")
    return args


def _sub_parser(parser: _Parser, name: str) -> _Parser:
    sub_parsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    command = sub_parsers.choices[name]
    assert isinstance(command, _Parser)
    return command


def _apply_config_file(command: argparse.ArgumentParser, path: Path, *, keep_budget: bool) -> None:
    """Make the file's values the defaults of a command; a value that is wrong ends the process with status 2.

    The file's budgets count with `keep_budget` only: beside ``--budget`` they would be added to its list.
    """
    values = _config_values(command, path)
    actions = {action.dest: action for action in command._actions if action.dest not in ("help", "config")}
    for key, value in values.items():
        action = actions.get(str(key).replace("-", "_"))
        if action is None:
            command.error(f"--config {path}: unknown flag {key!r}; known: {', '.join(sorted(actions))}")
        if value is None:  # the flag's default, as if the line were absent
            continue
        if action.dest != "budget" or keep_budget:
            command.set_defaults(**{action.dest: _config_value(command, action, key, value, path)})


def _config_values(command: argparse.ArgumentParser, path: Path) -> dict[Any, Any]:
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


def _config_value(command: argparse.ArgumentParser, action: argparse.Action, key: Any, value: Any, path: Path) -> Any:
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
