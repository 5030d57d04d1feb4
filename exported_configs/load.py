"""Reading a profile that may be hostile: it decides addresses in GPU kernels. Knows nothing of models.

Size, encoding, nesting, duplicate keys and numbers are checked here, before and while the JSON is parsed;
what the fields must hold is the profile's own matter.
"""

import json
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.fields import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile import SCHEMA_VERSION, Profile, explain
from kvtuner.precision import LAYOUT_ID

MAX_DEPTH: Final = 16
MAX_FIELDS: Final = 64
MAX_ITEMS: Final = 1024
MAX_INTEGER_DIGITS: Final = 20

_FIELD_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Possessive, so that an unclosed string costs one pass and not one for every quote in it.
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_STEP: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def load_profile(source: str | Path | bytes) -> Profile:
    """Read and check a profile.

    Args:
        source: path of the file, or its content.

    Raises:
        ProfileError: whatever is wrong with it; one line with the file, the rule and the value.
    """
    name = "profile" if isinstance(source, bytes) else str(source)
    try:
        return _parse(source if isinstance(source, bytes) else _read(Path(source)))
    except ProfileError as error:
        raise ProfileError(f"{name if name.isprintable() else ascii(name)}: {error}") from error


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as handle:
            return handle.read(MAX_PROFILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ProfileError(f"cannot be read ({reason}); give the path of a profile.json") from error


def _parse(data: bytes) -> Profile:
    if len(data) > MAX_PROFILE_BYTES:
        raise ProfileError(f"must be at most {MAX_PROFILE_BYTES} bytes, but is larger; this is no profile")
    document = _parse_json(data)
    _check_version(document)
    _check_lengths(document)
    try:
        return Profile.model_validate(document)
    except ValidationError as error:
        raise ProfileError(f"{explain(error)}; export the profile again") from error


def _parse_json(data: bytes) -> Any:
    if data.startswith(b"\xef\xbb\xbf"):
        raise ProfileError("must be UTF-8 without a byte order mark; save it without one")
    _check_depth(data)
    try:
        return json.loads(data.decode(), object_pairs_hook=_object, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise ProfileError(f"must be UTF-8, but byte {error.start} is not; fetch the file again") from error
    except json.JSONDecodeError as error:
        raise ProfileError(f"must be JSON ({error}); fetch the file again") from error


def _check_depth(data: bytes) -> None:
    """Bound the nesting before the parser recurses; sees the brackets that the parser will see, or more."""
    brackets = _STRING.sub(b"", data).translate(None, _NOT_BRACKETS)
    depth = max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
    if depth > MAX_DEPTH:
        raise ProfileError(f"must nest at most {MAX_DEPTH} deep, but nests {depth}; this is no profile")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_FIELDS:
        raise ProfileError(f"an object must have at most {MAX_FIELDS} fields, not {len(pairs)}; this is no profile")
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if _FIELD_NAME.fullmatch(name) is None:
            raise ProfileError(f"unknown field {name[:60]!a}; export the profile again")
        if name in fields:
            raise ProfileError(f"field {name!r} stands twice in one object; export the profile again")
        fields[name] = value
    return fields


def _integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise ProfileError(
            f"an integer must have at most {MAX_INTEGER_DIGITS} digits, not {len(text)}; export the profile again"
        )
    return int(text)


def _check_version(document: Any) -> None:
    """Name a newer format before its new fields are called unknown."""
    if not isinstance(document, dict):
        raise ProfileError(f"must be a JSON object, not {type(document).__name__}; this is no profile")
    version = document.get("schema_version")
    if type(version) is not int or version < 1:
        raise ProfileError(f"schema_version must be {SCHEMA_VERSION}, not {_short(version)}; this is no profile")
    if version > SCHEMA_VERSION:
        raise ProfileError(f"schema_version is {version}, but this kvtuner reads {SCHEMA_VERSION}; upgrade kvtuner")
    layout = document.get("layout")
    if layout != LAYOUT_ID:
        raise ProfileError(f"layout must be {LAYOUT_ID!r}, not {_short(layout)}; upgrade kvtuner, or export again")


def _check_lengths(node: Any) -> None:
    """Bound every list: pydantic would collect an error for each of millions of items."""
    if isinstance(node, list) and len(node) > MAX_ITEMS:
        raise ProfileError(f"a list must have at most {MAX_ITEMS} items, not {len(node)}; this is no profile")
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _check_lengths(child)


def _short(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return ascii(value)[:60]
