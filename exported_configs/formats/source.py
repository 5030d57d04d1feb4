"""JSON and YAML of anybody, bounded in size and depth. Knows nothing of what they hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import yaml

from kvtuner.errors import ProfileError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_YAML_BYTES: Final = 1 << 16
MAX_JSON_BYTES: Final = 8 << 20  # the weights' own map of a model with many experts stands in the same file
MAX_YAML_DEPTH: Final = 8
MAX_INTEGER_DIGITS: Final = 20

_TOO_DEEP: Final = "nests too deep; this is no such file"


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
    """What a JSON file holds; no name stands twice in an object.

    Raises:
        ProfileError: too large, too deep, or no JSON.
    """
    text = decode(data, MAX_JSON_BYTES)
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ProfileError(f"must be JSON ({error}); fetch the file again") from error
    except RecursionError as error:
        raise ProfileError(_TOO_DEEP) from error


def read_yaml(data: bytes) -> Any:
    """What a YAML file of plain mappings, lists and scalars holds: no anchors, tags or names that stand twice.

    Raises:
        ProfileError: too large, too deep, no YAML, or more than that.
    """
    text = decode(data, MAX_YAML_BYTES)
    try:
        _check_events(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ProfileError(f"must be YAML ({' '.join(str(error).split())[:200]!a}); fetch the file again") from error
    except (ValueError, ArithmeticError) as error:  # dates and numbers that look right and are not
        raise ProfileError(f"holds a date or number that is none ({str(error)[:100]!a}); quote it") from error


class _Loader(yaml.SafeLoader):
    """The safe loader, which builds plain values alone, without merging and without dropping names."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise ProfileError("has a YAML merge key (<<); write every layer out")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            raise ProfileError(f"line {node.start_mark.line + 1}: a name stands twice in one mapping; remove one")
        return mapping


def _yaml_integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    _check_digits(str(node.value))
    return int(loader.construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _yaml_integer)


def _check_events(text: str) -> None:
    """See what the file is made of before anything is built: an alias of aliases would grow without bound."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ProfileError("has a YAML anchor or alias; write every layer out")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise ProfileError(f"has the YAML tag {str(tag)[:60]!a}; plain values need none")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            raise ProfileError(_TOO_DEEP)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ProfileError(f"{name[:60]!a} stands twice in one object; remove one")
        fields[name] = value
    return fields


def _integer(text: str) -> int:
    _check_digits(text)
    return int(text)


def _check_digits(text: str) -> None:
    if len(text) > MAX_INTEGER_DIGITS:
        raise ProfileError(f"an integer must have at most {MAX_INTEGER_DIGITS} digits, not {len(text)}")
