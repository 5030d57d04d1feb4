"""A command of the command line, and the flags that commands share. Imports nothing heavy.

A command's module imports heavy modules only when the command runs.
"""

from __future__ import annotations

import argparse
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtuner.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PROFILE_HELP: Final = (
    "profile.json, run folder, owner/name[@revision][:path] of the hub, or catalogue:name; #sha256:... pins"
)


class Command(NamedTuple):
    """A command by its name: its line of help, what adds its flags to a parser, and what runs it for an exit status.

    A command that `resumes` goes on where the same one was interrupted.
    """

    name: str
    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    resumes: bool = False


def add_options(
    parser: argparse.ArgumentParser, options: Any, title: str | None = None, texts: Mapping[str, str] | None = None
) -> None:
    """Add a flag for every option of a dataclass, in groups; options in a field of options are a group of its name.

    The title is that of the first group, and texts take the place of lines of help, by the name of the field; see
    `option` and `option_group` of `kvtuner.pipeline.flags.option_fields`.
    """
    group = parser.add_argument_group(title) if title else parser
    for item in fields(options):
        if is_dataclass(item.default_factory):
            add_options(parser, item.default_factory, item.name, item.metadata)
        elif "help" in item.metadata:
            settings = {"default": list(item.default) if item.default == () else item.default, **item.metadata}
            settings["help"] = (texts or {}).get(item.name, settings["help"])
            if heading := settings.pop("group", None):
                group = parser.add_argument_group(heading)
            if isinstance(item.default, bool):
                settings["action"] = argparse.BooleanOptionalAction
            if read := settings.pop("type", None):
                settings["type"] = flag_type(read)
            aliases = settings.pop("aliases", ())
            group.add_argument(f"--{item.name.replace('_', '-')}", **settings)
            for alias in aliases:
                unseen = {"dest": item.name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
                group.add_argument(f"--{alias}", **{**settings, **unseen})


def flag_type(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """The type of a flag whose text `read` reads: argparse hides the text of any error but its own."""

    @wraps(read)
    def parse(text: str) -> Any:
        try:
            return read(text)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def add_switch(group: argparse._ActionsContainer, flag: str, text: str, *, default: bool = False) -> None:
    """Add a flag that ``--no-`` turns off, be it on by default or by the YAML file."""
    group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)


def add_profile(parser: argparse.ArgumentParser, name: str, **settings: Any) -> None:
    """Add the argument that names a profile: a file, a run folder, a profile of the hub or one of the catalogue."""
    parser.add_argument(name, **{"metavar": "PROFILE", "help": PROFILE_HELP, **settings})
