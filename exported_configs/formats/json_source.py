"""Foreign JSON, bounded in size and depth. Knows nothing of what it holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ProfileError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_YAML_BYTES: Final = 1 << 16
MAX_JSON_BYTES: Final = 8 << 20  # the weights' own map of a model with many experts stands in the same file
MAX_INTEGER_DIGITS: Final = 20

TOO_DEEP: Final = "nests too deep; this is no such file"


def decode(data: bytes, max_bytes: int) -> str:
    """The text of a file.

    Raises:
        ProfileError: too large, or no UTF-8.
    """
    if len(data) > max_bytes:
        raise ProfileError(f"must be at most {max_bytes} bytes, but is larger; this is no such file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"must be UTF-8, but byte {error.start} is not; fetch the file again") from error


def read_json(data: bytes) -> Any:
    """The value of a JSON file; no name stands twice in an object.

    Raises:
        ProfileError: too large, too deep, or no JSON.
    """
    text = decode(data, MAX_JSON_BYTES)
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ProfileError(f"must be JSON ({error}); fetch the file again") from error
    except RecursionError as error:
        raise ProfileError(TOO_DEEP) from error


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ProfileError(f"{name[:60]!a} stands twice in one object; remove one")
        fields[name] = value
    return fields


def _integer(text: str) -> int:
    check_digits(text)
    return int(text)


def check_digits(text: str) -> None:
    """Refuse an integer that nobody writes, before it is built.

    Raises:
        ProfileError: too many digits.
    """
    if len(text) > MAX_INTEGER_DIGITS:
        raise ProfileError(f"an integer must have at most {MAX_INTEGER_DIGITS} digits, not {len(text)}")
