"""The parser of the command line, out of what each command says of itself. Imports nothing heavy."""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from kvtuner import __version__
from kvtuner.cli.commands import (
    diff,
    doctor,
    eval_bench,
    import_export,
    list_,
    push_pull,
    search_calibrate,
    show_report,
    sign_verify,
    validate,
)
from kvtuner.cli.config_file import apply_config_file
from kvtuner.cli.shared_flags import add_switch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.cli.command import Command

_MODULES: Final = (
    search_calibrate,
    eval_bench,
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


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None and off."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, argparse.SUPPRESS, []):
            return action.help
        return super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, as everything else does; the flags are in ``--help``."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    parser = _Parser(prog="kvtuner", description="Per-layer mixed-precision KV caches: measure, search, prove, share.")
    parser.add_argument("--version", action="version", version=f"kvtuner {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS.values():
        sub_parser = commands.add_parser(
            command.name, help=command.summary, description=command.summary, formatter_class=_Help
        )
        command.add_flags(sub_parser)
        add_switch(sub_parser, "--json", "print the result as JSON on stdout")
        add_switch(sub_parser, "--debug", "traceback instead of one line")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse flags over the YAML file that ``--config`` names, if any; argparse exits with 2 on a bad flag."""
    args = parser.parse_args(argv)
    if getattr(args, "config", None):
        sub_parsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        apply_config_file(
            sub_parsers.choices[args.command], Path(args.config), keep_budget=not getattr(args, "budget", None)
        )
        args = parser.parse_args(argv)
    if args.command in ("search", "calibrate") and not args.model:
        parser.error(f"{args.command} needs --model")
    return args
