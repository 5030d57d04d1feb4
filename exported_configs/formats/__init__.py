"""Profiles from and to the files of other tools. Knows nothing of paths or flags.

A new format is a module here with ``write(profile)``, and perhaps ``read(data, geometry, options)``, and one row of
`FORMATS`. The modules need not load fast: `conversion` imports the one that is asked for. Other packages use
`conversion` (`read`, `write`, `ImportOptions`, `parse_map`).
"""

from dataclasses import dataclass
from typing import Final

PRESETS: Final = ("pertoken", "kivi")


@dataclass(frozen=True, slots=True)
class Format:
    """One format of another tool.

    Attributes:
        module: The name of the module in this package.
        options: The fields of `ImportOptions` that mean something to the format; None where it cannot be imported.
        can_lose: Whether ``--lossy`` may write a file without all that the profile says.
    """

    module: str
    options: tuple[str, ...] | None = None
    can_lose: bool = False


FORMATS: Final = {
    "kvtuner-yaml": Format("kvtuner_yaml", ("scheme", "group_size"), can_lose=True),
    "modelopt": Format("modelopt", ("words", "group_size", "symmetric")),
    "optiq": Format("optiq", ("group_size",)),
    "ranges": Format("dtype_ranges", ("words", "group_size", "symmetric", "default_word"), can_lose=True),
    "vllm-skip-layers": Format("vllm_skip_layers", can_lose=True),
}


def readable() -> tuple[str, ...]:
    """The names of the formats that can be imported."""
    return tuple(name for name, form in FORMATS.items() if form.options is not None)


def writable() -> tuple[str, ...]:
    """The names of the formats that can be exported."""
    return tuple(FORMATS)
