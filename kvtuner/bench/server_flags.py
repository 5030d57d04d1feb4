"""The flags of ``--server-args``, which all servers get: checked, read, and without paths for a report."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from kvtuner.errors import EndpointError
from kvtuner.exported_configs.identity.model_identity import public_name

OURS: Final = {
    "--host": "servers listen on this machine alone",
    "--port": "a free one is taken",
    "--model-path": "give --model",
    "--model": "give it outside of --server-args",
    "--revision": "give it outside of --server-args",
    "--context-length": "give it outside of --server-args",
    "--max-total-tokens": "give --kv-memory, which is the same bytes for every scheme",
    "--kv-cache-dtype": "fp8 is a scheme of its own",
    "--kvtuner-profile": "every scheme has its own",
    "--enable-kvtuner-quant": "every scheme has its own",
    "--kvtuner-allow-derived": "the profile's server gets it where it needs it, and what differs is said",
    "--kvtuner-strict": "what differs is said; `kvtuner validate --strict` refuses it",
    "--api-key": "servers that are started here need none",
    "--admin-api-key": "servers that are started here need none",
}
"""Flags that have another place, and that place."""


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Flags of ``sglang.launch_server``.

    Attributes:
        words: The words of the command line.
    """

    words: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> ServerFlags:
        """Read them as a shell does.

        Raises:
            EndpointError: quotes that do not close, or a flag of `OURS`.
        """
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise EndpointError(f"--server-args {text!r} cannot be read: {error}") from error
        for word in words:
            if reason := OURS.get(word.partition("=")[0]):
                raise EndpointError(f"{word.partition('=')[0]} cannot stand in --server-args: {reason}")
        return cls(words)

    def value(self, flag: str) -> str | None:
        """The value of a flag, in either spelling; None without it."""
        for index, word in enumerate(self.words):
            name, equals, value = word.partition("=")
            if name == flag:
                return value if equals else next(iter(self.words[index + 1 :]), None)
        return None

    def shared(self) -> list[str]:
        """The words with the last parts of paths only."""
        return [_shared(word) for word in self.words]


def _shared(word: str) -> str:
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    if value.startswith(("/", ".", "~")):
        return f"{flag}{equals}{PurePath(value).name}"
    return f"{flag}{equals}{public_name(value) if '/' in value else value}"
