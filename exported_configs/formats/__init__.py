"""The formats of other tools' files of per-layer precision, each with its reader and writer. Knows no files.

A new format is a module here with `write`, and perhaps `read`, and one row of `FORMATS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.exported_configs.formats import dtype_ranges, kvtuner_yaml, modelopt, optiq, vllm_skip_layers
from kvtuner.exported_configs.formats.kvtuner_yaml import SCHEMES as SCHEMES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.exported_configs.formats.export_requirements import Exported
    from kvtuner.exported_configs.formats.import_result import Imported, ImportOptions
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.geometry import ModelGeometry


@dataclass(frozen=True, slots=True)
class Format:
    """One format of another tool.

    Attributes:
        write: The function that makes the format's file of a profile.
        read: The function that reads the format's file; None where it cannot be imported.
        options: The fields of `ImportOptions` that mean something to the format.
        can_lose: Whether ``--lossy`` may write a file without all that the profile says.
    """

    write: Callable[[Profile], Exported]
    read: Callable[[bytes, ModelGeometry, ImportOptions], Imported] | None = None
    options: tuple[str, ...] = ()
    can_lose: bool = False


FORMATS: Final = {
    "kvtuner-yaml": Format(kvtuner_yaml.write, kvtuner_yaml.read, ("scheme", "group_size")),
    "modelopt": Format(modelopt.write, modelopt.read, ("words", "group_size", "symmetric")),
    "optiq": Format(optiq.write, optiq.read, ("group_size",)),
    "ranges": Format(
        dtype_ranges.write, dtype_ranges.read, ("words", "group_size", "symmetric", "default_word"), can_lose=True
    ),
    "vllm-skip-layers": Format(vllm_skip_layers.write, can_lose=True),
}


def readable() -> tuple[str, ...]:
    """The names of the formats that can be imported."""
    return tuple(name for name, form in FORMATS.items() if form.read is not None)


def writable() -> tuple[str, ...]:
    """The names of the formats that can be exported."""
    return tuple(FORMATS)
