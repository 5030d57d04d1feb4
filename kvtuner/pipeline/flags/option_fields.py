"""Fields of dataclasses that are options: their flags, their values by name, and the check of a value from Python.

Imports nothing heavy. The command line makes its flags of such classes, and the Python interface its parameters: a
field is called like its flag, and options in a field of options are a group of flags. A field without help is no flag
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvtuner.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

Options = TypeVar("Options")


def option(default: Any, text: str, **flag: Any) -> Any:
    """A field that is a flag with a line of help; it is a switch where its default is True or False.

    Further settings are arguments of argparse, such as the `type` that reads the text, and checks values from Python;
    `group` is the title of a group of flags that begins with this one, and `aliases` are other names that help leaves
    out.
    """
    return field(default=default, metadata={"help": text, **flag})


def option_group(kind: type[Options], **texts: str) -> Any:
    """A field of options that are a group of flags; texts take the place of lines of help, by the name of the field."""
    assert texts.keys() <= flag_fields(kind).keys()
    return field(default_factory=kind, metadata=texts)


def options_from(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """Options out of values by the name of their flag, in one mapping for nested options too.

    A field that the values lack has its default; values that are no fields are left alone.
    """
    plain: dict[str, Any] = {}
    for item in _fields(kind):
        if nested := _nested(item):
            plain[item.name] = options_from(nested, values)
        elif item.name in values:
            value = values[item.name]
            # argparse collects lists; frozen options hold tuples.
            plain[item.name] = tuple(value) if isinstance(value, list) else value
    return kind(**plain)


def flag_values(options: object) -> dict[str, Any]:
    """The values of all fields by the name of their flag, with those of options that a field holds."""
    values: dict[str, Any] = {}
    for item in _fields(type(options)):
        value = getattr(options, item.name)
        values |= flag_values(value) if is_dataclass(value) else {item.name: value}
    return values


def defaults_of(kind: type) -> dict[str, Any]:
    """The defaults of a dataclass of options by the name of their flag, without fields that have none."""
    return {name: item.default for name, item in flag_fields(kind).items() if item.default is not MISSING}


def flag_fields(kind: type) -> dict[str, Field[Any]]:
    """The fields of a dataclass of options by the name of their flag, with those of options that a field holds."""
    flags: dict[str, Field[Any]] = {}
    for item in _fields(kind):
        nested = _nested(item)
        flags |= flag_fields(nested) if nested else {item.name: item}
    return flags


def check_options(options: object) -> None:
    """Refuse values that the text of their flag could not be; a value that is such a text becomes what it says."""
    for item in _fields(type(options)):
        value = getattr(options, item.name)
        if value is not None and not _nested(item):
            try:
                object.__setattr__(options, item.name, _checked(item, value))
            except OptionError as error:
                raise OptionError(f"{item.name} {error}") from error


def _checked(item: Field[Any], value: Any) -> Any:
    """What a value of a field that is not None stands for."""
    choices, read = item.metadata.get("choices"), item.metadata.get("type")
    if choices and value not in choices:
        raise OptionError(f"must be one of {', '.join(map(repr, choices))}, not {value!r}")
    if isinstance(item.default, bool) and not isinstance(value, bool):
        raise OptionError(f"must be True or False, not {value!r}")
    if read is None or item.metadata.get("action") == "append":
        return value
    if isinstance(value, str):
        return read(value)
    is_list = isinstance(value, Sequence)
    if is_list and not value:  # no flag says so; of schemes and levels it means none
        return ()
    found = read(",".join(map(str, value)) if is_list else str(value))
    return value if isinstance(found, float) else found  # the text of a bandwidth has another unit


def _fields(kind: Any) -> tuple[Field[Any], ...]:
    return fields(kind)


def _nested(item: Field[Any]) -> type[Any] | None:
    return cast("type[Any]", item.default_factory) if is_dataclass(item.default_factory) else None
