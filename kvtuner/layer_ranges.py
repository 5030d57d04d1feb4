"""Ranges of layers with a precision each, as people type them: ``0-1:bf16,62:int8``. Knows neither models nor bits."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtuner.errors import PrecisionError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_RANGES_TEXT: Final = 1 << 16

# Four digits bound the work that a hostile range can ask for.
_LAYERS: Final = re.compile(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", re.ASCII)


class LayerRange(NamedTuple):
    """A range of layers with the text of its precision."""

    first: int
    last: int
    precision: str


def read_ranges(text: str) -> list[LayerRange]:
    """Read the ranges of a text, in its order; `PrecisionError` where an entry is none, or the text is too long."""
    if len(text) > MAX_RANGES_TEXT:
        raise PrecisionError(f"layers are given in at most {MAX_RANGES_TEXT} characters, not {len(text)}")
    return [_entry(entry) for entry in text.split(",")]


def read_layers(layers: str, precision: str) -> LayerRange:
    """Read one range, its layers, ``0`` or ``2-27``, apart from its precision; `PrecisionError` where they are none."""
    return _entry(f"{layers}:{precision}")


def precisions_by_layer(ranges: Iterable[LayerRange]) -> dict[int, str]:
    """The precision of every layer in the ranges; `PrecisionError` where a layer is named twice."""
    precisions: dict[int, str] = {}
    for first, last, precision in ranges:
        for layer in range(first, last + 1):
            if layer in precisions:
                raise PrecisionError(f"each layer may be given once, but layer {layer} is twice")
            precisions[layer] = precision
    return precisions


def write_ranges(precisions: Iterable[object], *, start: int = 0, ids: Iterable[int] | None = None) -> str:
    """Write the precisions of the layers from `start` on, or of those of ascending ids.

    Neighbours with the same precision are one range.
    """
    entries = []
    layers_of = enumerate(precisions, start) if ids is None else zip(ids, precisions, strict=True)
    # Neighbours have one distance from their place.
    placed = ((layer - place, layer, precision) for place, (layer, precision) in enumerate(layers_of))
    for (_, precision), members in groupby(placed, key=lambda item: (item[0], item[2])):
        layers = [layer for _, layer, _ in members]
        name = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
        entries.append(f"{name}:{precision}")
    return ",".join(entries)


def write_layers(layers: Iterable[int]) -> str:
    """Write ascending layers, neighbours as one range, such as ``0-2, 4, 8-11``."""
    runs = groupby(enumerate(layers), key=lambda item: item[1] - item[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(members) for _, members in runs)]
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)


def _entry(entry: str) -> LayerRange:
    layers, _, precision = entry.partition(":")
    match = _LAYERS.fullmatch(layers)
    if match is None or not precision.strip():
        raise PrecisionError(f"an entry is written 0:K8V8 or 2-27:K4V2, not {entry.strip()[:60]!r}")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first:
        raise PrecisionError(f"a range goes from its lower to its higher layer, not {entry.strip()[:60]!r}")
    return LayerRange(first, last, precision.strip())
