"""Foreign YAML, bounded in size and depth, plain values alone. Knows nothing of what it holds."""

from __future__ import annotations

from typing import Any, Final

import yaml

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats.json_source import MAX_YAML_BYTES, TOO_DEEP, check_digits, decode

MAX_YAML_DEPTH: Final = 8


def read_yaml(data: bytes) -> Any:
    """The value of a YAML file of plain mappings, lists and scalars: no anchors, tags or names that stand twice.

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
    check_digits(str(node.value))
    return int(loader.construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _yaml_integer)


def _check_events(text: str) -> None:
    """Refuse anchors, aliases and tags before anything is built: an alias of aliases would grow without bound."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ProfileError("has a YAML anchor or alias; write every layer out")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise ProfileError(f"has the YAML tag {str(tag)[:60]!a}; plain values need none")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            raise ProfileError(TOO_DEEP)
