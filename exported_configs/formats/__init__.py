"""Other tools' files of per-layer precision: which there are. How they are read and written is `translate`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Format:
    """What can be done with one format.

    Attributes:
        is_read: whether it can be imported.
        is_written: whether a profile can be exported to it.
        options: fields of `ImportOptions` that mean something to it.
        can_lose: whether it may be written without all that the profile says, if that is asked for.
    """

    is_read: bool = True
    is_written: bool = True
    options: tuple[str, ...] = ()
    can_lose: bool = False


FORMATS: Final = {
    "kvtuner-yaml": Format(options=("scheme", "group_size")),
    "modelopt": Format(options=("words", "group_size", "symmetric")),
    "optiq": Format(options=("group_size",)),
    "ranges": Format(options=("words", "group_size", "symmetric", "default_word"), can_lose=True),
    "vllm-skip-layers": Format(is_read=False, can_lose=True),
}
READ: Final = tuple(name for name, known in FORMATS.items() if known.is_read)
WRITTEN: Final = tuple(name for name, known in FORMATS.items() if known.is_written)
SCHEMES: Final = ("pertoken", "kivi")
