"""Reading a JSON file that may be hostile. Knows nothing of what it should hold.

Size, encoding, nesting, duplicate keys and numbers are checked before and while the JSON is parsed; what the fields
must hold is the reader's matter.
"""

import codecs
import errno
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from kvtuner.errors import ProfileError

ModelT = TypeVar("ModelT", bound=BaseModel)

MAX_DEPTH: Final = 16
MAX_FIELDS: Final = 64
MAX_ITEMS: Final = 1024
MAX_INTEGER_DIGITS: Final = 20

_FIELD_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Possessive, so that an unclosed string costs one pass and not one for every quote in it.
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_OPENED: Final = ("/dev/fd", "/dev/stdin", "/proc")
"""The places of files that a process has open already."""
_STEP: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


@dataclass(frozen=True, slots=True)
class DocumentKind:
    """One kind of JSON file: its noun and the advice for a damaged one in messages, and its bounds.

    `check_version` refuses a newer format by name, before any of its fields is called wrong.
    """

    noun: str
    again: str
    max_bytes: int
    field_name: re.Pattern[str] = _FIELD_NAME
    max_fields: int = MAX_FIELDS
    max_depth: int = MAX_DEPTH
    check_version: Callable[[dict[str, Any]], None] = lambda document: None


@contextmanager
def naming(source: str | Path | bytes, kind: DocumentKind) -> Iterator[None]:
    """Put the name of the file before the errors inside."""
    name = kind.noun if isinstance(source, bytes) else str(source)
    try:
        yield
    except ProfileError as error:
        raise ProfileError(f"{name if name.isprintable() else ascii(name)}: {error}") from error


def read_document(source: str | Path | bytes, kind: DocumentKind) -> dict[str, Any]:
    """The JSON object of a file, or of its content; `ProfileError` where it is none within the bounds."""
    document = parse_json(source if isinstance(source, bytes) else _read(Path(source), kind), kind)
    if not isinstance(document, dict):
        raise ProfileError(f"must be a JSON object, not {type(document).__name__}; this is no {kind.noun}")
    kind.check_version(document)
    _check_lengths(document, kind)
    return document


def parse_json(data: bytes, kind: DocumentKind) -> Any:
    """The value of a JSON text without names that stand twice; `ProfileError` where it is none within the bounds."""
    if len(data) > kind.max_bytes:
        raise ProfileError(f"must be at most {kind.max_bytes} bytes, but is larger; this is no {kind.noun}")
    if data.startswith(codecs.BOM_UTF8):
        raise ProfileError("must be UTF-8 without a byte order mark; save it without one")
    _check_depth(data, kind)
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=lambda pairs: _object(pairs, kind),
            parse_int=lambda text: int(check_digits(text, kind.again)),
        )
    except UnicodeDecodeError as error:
        raise ProfileError(f"must be UTF-8, but byte {error.start} is not; fetch the file again") from error
    except json.JSONDecodeError as error:
        raise ProfileError(f"must be JSON ({error}); fetch the file again") from error


def check_digits(text: str, advice: str) -> str:
    """The text of an integer in a file; one with more digits than anybody writes is refused."""
    if len(text) > MAX_INTEGER_DIGITS:
        raise ProfileError(f"an integer must have at most {MAX_INTEGER_DIGITS} digits, not {len(text)}; {advice}")
    return text


def short(value: object) -> str:
    """The beginning of a value of any size, for a message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return ascii(value)[:60]


def validated(model: type[ModelT], fields: object, *, place: str = "", way_out: str = "") -> ModelT:
    """Build a model from a document; a `ProfileError` has the first wrong field's place, the rule and the way out."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise ProfileError(explain(error, place) + (f"; {way_out}" if way_out else "")) from error


def explain(error: ValidationError, root: str = "") -> str:
    """The first failure of a validation in one line: place (below `root`), rule and value."""
    first = error.errors(include_url=False)[0]
    place = root + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    rule = _rule(first["type"], first["msg"], first["input"])
    return f"{place.lstrip('.')}: {rule}" if place else rule


def _rule(kind: str, message: str, value: object) -> str:
    if kind == "missing":
        return "the field is missing"
    if kind == "extra_forbidden":
        return "unknown field"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if value is None or isinstance(value, bool | int | float | str):
        message += f", not {value!a}" if len(ascii(value)) <= 60 else f", not {ascii(value)[:57]}..."
    return message.replace("Input should", "must")


def one_line(error: BaseException) -> str:
    """The text of an error as a terminal shows it, at most 200 characters; its class where it has none."""
    line = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else "?" for c in line)[:200]


def first_bytes(path: Path, most: int) -> bytes:
    """The first bytes of a file, so many at most; `OSError` also for a named pipe, whose reader waits without an end.

    A pipe that a shell opened, such as ``/dev/stdin`` or ``/dev/fd/63``, has a writer.
    """
    if path.is_fifo() and not any(map(path.is_relative_to, _OPENED)):
        raise OSError(errno.EINVAL, "a named pipe, where a file is expected")
    with path.open("rb") as handle:
        return handle.read(most)


def _read(path: Path, kind: DocumentKind) -> bytes:
    try:
        return first_bytes(path, kind.max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ProfileError(f"cannot be read ({reason}); give the path of a {kind.noun}.json") from error


def _check_depth(data: bytes, kind: DocumentKind) -> None:
    """Bound the nesting before the parser recurses; sees the brackets that the parser will see, or more."""
    brackets = _STRING.sub(b"", data).translate(None, _NOT_BRACKETS)
    depth = max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
    if depth > kind.max_depth:
        raise ProfileError(f"must nest at most {kind.max_depth} deep, but nests {depth}; this is no {kind.noun}")


def _check_lengths(node: Any, kind: DocumentKind) -> None:
    """Bound every list: pydantic would collect an error for each of millions of items."""
    if isinstance(node, list) and len(node) > MAX_ITEMS:
        raise ProfileError(f"a list must have at most {MAX_ITEMS} items, not {len(node)}; this is no {kind.noun}")
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _check_lengths(child, kind)


def _object(pairs: Sequence[tuple[str, Any]], kind: DocumentKind) -> dict[str, Any]:
    if len(pairs) > kind.max_fields:
        raise ProfileError(
            f"an object must have at most {kind.max_fields} fields, not {len(pairs)}; this is no {kind.noun}"
        )
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if kind.field_name.fullmatch(name) is None:
            raise ProfileError(f"unknown field {name[:60]!a}; {kind.again}")
        if name in fields:
            raise ProfileError(f"field {name[:60]!a} stands twice in one object; {kind.again}")
        fields[name] = value
    return fields
