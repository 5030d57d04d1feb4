"""Other tools' files of per-layer precision: which there are, and who reads and writes each. Knows no files."""

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
    """What can be done with one format.

    Attributes:
        write: makes its file of a profile.
        read: reads its file; None where it cannot be imported.
        options: fields of `ImportOptions` that mean something to it.
        can_lose: whether it may be written without all that the profile says, if that is asked for.
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
READ: Final = tuple(name for name, known in FORMATS.items() if known.read is not None)
WRITTEN: Final = tuple(FORMATS)
