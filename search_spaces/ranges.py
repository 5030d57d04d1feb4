"""Hand-written precisions: ``0-1:bf16,2-27:K4V2`` for all layers, ``0:K8V8`` for some. Knows no model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvtuner.errors import PrecisionError, SearchSpaceError
from kvtuner.precision import PrecisionPair

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Four digits bound the work that a hostile range can ask for.
_ENTRY = re.compile(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?:(.+)", re.ASCII)


def parse_keep(text: str) -> dict[int, PrecisionPair]:
    """Read the layers whose precision the search must keep: ``0:K8V8,27:16``, ranges too.

    Raises:
        SearchSpaceError: an entry that cannot be read, or a layer named twice.
    """
    kept: dict[int, PrecisionPair] = {}
    for layer, pair in _entries(text):
        if layer in kept:
            raise SearchSpaceError(f"each layer may be given once, but layer {layer} is twice in {text!r}")
        kept[layer] = pair
    return kept


def parse_ranges(text: str, num_layers: int) -> list[PrecisionPair]:
    """Read a precision for every layer of a model: ``0-1:bf16,2-27:K4V2``.

    Raises:
        SearchSpaceError: an entry that cannot be read, or a layer that is missing, twice or not of the model.
    """
    pairs = parse_keep(text)
    check_layers(pairs, num_layers)
    missing = [layer for layer in range(num_layers) if layer not in pairs]
    if missing:
        raise SearchSpaceError(
            f"every layer needs a precision, but {text!r} has none for layer {missing[0]};"
            f" the model has layers 0-{num_layers - 1}"
        )
    return [pairs[layer] for layer in range(num_layers)]


def check_layers(layers: Iterable[int], num_layers: int) -> None:
    """Check that the model has all of `layers`.

    Raises:
        SearchSpaceError: it has not; names the first.
    """
    for layer in sorted(layers):
        if not 0 <= layer < num_layers:
            raise SearchSpaceError(f"the model has layers 0-{num_layers - 1}, so layer {layer} cannot be given")


def _entries(text: str) -> Iterator[tuple[int, PrecisionPair]]:
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise SearchSpaceError(f"an entry is written 0:K8V8 or 2-27:K4V2, not {entry.strip()!r}")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise SearchSpaceError(f"a range goes from its lower to its higher layer, not {entry.strip()!r}")
        try:
            pair = PrecisionPair.parse(match[3])
        except PrecisionError as error:
            raise SearchSpaceError(f"{entry.strip()!r}: {error}") from error
        for layer in range(first, last + 1):
            yield layer, pair
