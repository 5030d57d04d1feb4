"""The types of flags: how an option's text is read, with refusals as argparse shows them."""

from __future__ import annotations

import argparse
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

from kvtuner.errors import OptionError
from kvtuner.pipeline import option_types

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Value = TypeVar("Value")


def flag_type(read: Callable[[str], Value]) -> Callable[[str], Value]:
    """The type of a flag whose text `read` reads: argparse hides the text of any error but its own."""

    @wraps(read)
    def parse(text: str) -> Value:
        try:
            return read(text)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


positive, several, seed = map(flag_type, (option_types.positive, option_types.several, option_types.seed))
counts, endpoint = flag_type(option_types.counts), flag_type(option_types.endpoint)


def words(known: Sequence[str] = ()) -> Callable[[str], tuple[str, ...]]:
    """A function that reads words between commas, each of them known where any are."""
    return flag_type(option_types.words(known))
