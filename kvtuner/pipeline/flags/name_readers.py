"""Readers of the names that flags take, which refuse others by an `OptionError`. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def names(choices: Sequence[str] = ()) -> Callable[[str], tuple[str, ...]]:
    """A function that reads names between commas, each of them one of the choices where there are any."""

    def parse(text: str) -> tuple[str, ...]:
        parts = tuple(part.strip() for part in text.split(",") if part.strip())
        if not parts:
            raise OptionError(f"must name one at least, not {text!r}")
        for part in parts:
            if choices and part not in choices:
                raise OptionError(f"{part!r} is none of {', '.join(choices)}")
        return parts

    return parse


def endpoint(text: str) -> tuple[str, str]:
    """A scheme and the URL of its server; the profile where no scheme is named."""
    scheme, is_named, url = text.partition("=")
    if not is_named or "://" in scheme:
        scheme, url = "profile", text
    if not url.startswith(("http://", "https://")):
        raise OptionError(f"an endpoint is http://HOST:PORT, or SCHEME=http://HOST:PORT, not {text!r}")
    return scheme, url
