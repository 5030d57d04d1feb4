"""Texts, lines and JSON of files, read as UTF-8; what is wrong is said with its place. Knows no documents."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JSON_LINES: Final = (".jsonl", ".ndjson")
"""The ends of files, in any case, that hold a JSON object on each line."""
_ENCODING: Final = "utf-8-sig"  # with or without a byte order mark


def text_of(path: Path, name: str) -> str:
    """The whole text of a file, which messages call `name`.

    Raises:
        CorpusError: It cannot be read, or is not UTF-8.
    """
    with _readable(name):
        return path.read_text(encoding=_ENCODING)


def lines_of(path: Path, name: str) -> Iterator[tuple[str, str]]:
    """The lines of a file that are not blank, each behind its place; only ends of lines end one, as in JSON lines.

    Raises:
        CorpusError: It cannot be read, or is not UTF-8.
    """
    with _readable(name), path.open(encoding=_ENCODING) as handle:
        for number, line in enumerate(handle, 1):
            if line.strip():
                yield f"{name}, line {number}", line.rstrip("\n")


def json_of(text: str, where: str, form: str) -> Any:
    """The value of a JSON text at a place; `form` says what belongs there.

    Raises:
        CorpusError: It is no JSON, or more than a parser takes.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise CorpusError(f"{where} is not JSON: {error.msg}, {place}; write {form} there") from error
    except RecursionError as error:
        raise CorpusError(f"{where} is nested too deeply; a text needs one object, a conversation three") from error
    except ValueError as error:  # an integer of too many digits, for which Python advises a call
        raise CorpusError(f"{where} holds an integer of too many digits; give it as a string") from error


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise CorpusError(f"{name} is not UTF-8 text: {error}; convert it, as by iconv -f LATIN1 -t UTF-8") from error
    except OSError as error:
        raise CorpusError(f"cannot read {name}: {error.strerror or error}; name a file that can be read") from error
