"""Hand-written precisions: ``0-1:bf16,2-27:K4V2`` for all layers, ``0:K8V8`` for some. Knows no model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.errors import PrecisionError, SearchSpaceError
from kvtuner.layer_ranges import precisions_by_layer, read_ranges, write_layers
from kvtuner.precision import PrecisionPair

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def parse_keep(text: str) -> dict[int, PrecisionPair]:
    """Read the layers whose precision the search must keep: ``0:K8V8,27:16``, ranges too.

    Raises:
        SearchSpaceError: An entry that cannot be read, or a layer named twice.
    """
    try:
        return {layer: _pair(layer, precision) for layer, precision in precisions_by_layer(read_ranges(text)).items()}
    except PrecisionError as error:
        raise SearchSpaceError(f"{error}, in {text[:200]!r}") from error


def parse_ranges(text: str, ids: Sequence[int]) -> list[PrecisionPair]:
    """Read a precision for every layer of a model that is tuned, by ascending ids: ``0-1:bf16,2-27:K4V2``.

    Raises:
        SearchSpaceError: An entry that cannot be read, or a layer that is missing, twice or not of the model.
    """
    pairs = parse_keep(text)
    check_layers(pairs, ids)
    missing = [layer for layer in ids if layer not in pairs]
    if missing:
        raise SearchSpaceError(
            f"every layer needs a precision, but {text!r} has none for layer {missing[0]}; {_has_layers(ids)}"
        )
    return [pairs[layer] for layer in ids]


def check_layers(layers: Iterable[int], ids: Sequence[int]) -> None:
    """Check that all of `layers` are among those of a model that are tuned, by ascending ids.

    Raises:
        SearchSpaceError: One is not; names the first.
    """
    for layer in sorted(layers):
        if layer not in ids:
            raise SearchSpaceError(f"{_has_layers(ids)}, so layer {layer} cannot be given")


def _has_layers(ids: Sequence[int]) -> str:
    if ids[-1] == len(ids) - 1:
        return f"the model has layers 0-{ids[-1]}"
    return f"the model has layers {write_layers(ids)} that are tuned, and others that keep their own cache"


def _pair(layer: int, precision: str) -> PrecisionPair:
    try:
        return PrecisionPair.parse(precision)
    except PrecisionError as error:
        raise PrecisionError(f"layer {layer}: {error}") from error
