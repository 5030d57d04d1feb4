"""Foreign JSON and YAML, bounded in size and depth, plain values alone. Knows nothing of what it holds."""

import codecs
import re
from typing import Any, Final

import yaml

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.document import DocumentKind, check_digits, parse_json

MAX_JSON_BYTES: Final = 8 << 20  # the weights' own map of a model with many experts stands in the same file
MAX_JSON_DEPTH: Final = 64  # the rest of the file is another tool's, to any depth that its parser reads
MAX_YAML_BYTES: Final = 1 << 16
MAX_YAML_DEPTH: Final = 8

_AGAIN: Final = "fetch the file again"
_JSON: Final = DocumentKind(
    "such file", _AGAIN, MAX_JSON_BYTES, re.compile(".*", re.DOTALL), MAX_JSON_BYTES, max_depth=MAX_JSON_DEPTH
)


def read_json(data: bytes) -> Any:
    """The value of a JSON file; `ProfileError` for one too large, too deep, or with a name twice in an object."""
    return parse_json(data.removeprefix(codecs.BOM_UTF8), _JSON)


def read_text(data: bytes) -> str:
    """The text of a file of YAML or ranges; a large file, or one that is no UTF-8, is refused."""
    if len(data) > MAX_YAML_BYTES:
        raise ProfileError(f"must be at most {MAX_YAML_BYTES} bytes, but is larger; this is no such file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"must be UTF-8, but byte {error.start} is not; {_AGAIN}") from error


def read_yaml(text: str) -> Any:
    """The value of YAML with plain mappings, lists and scalars; `ProfileError` for anything else, or too deep."""
    try:
        _check_events(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ProfileError(f"must be YAML ({' '.join(str(error).split())[:200]!a}); {_AGAIN}") from error
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
    check_digits(str(node.value), _AGAIN)
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
            raise ProfileError("nests too deep; this is no such file")
