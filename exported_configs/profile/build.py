"""A profile built from a search's choices, and its file. Knows nothing of how the choices were made."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtuner import __version__
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.arrays import encode_fp16
from kvtuner.exported_configs.profile.digest import digest_of
from kvtuner.exported_configs.profile.document import validated
from kvtuner.exported_configs.profile.evidence import BudgetRecord, Libraries, Provenance
from kvtuner.exported_configs.profile.fields import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.layer_storage import Defaults, GeometryRecord, LayerRecord
from kvtuner.exported_configs.profile.profile import SCHEMA_VERSION, Profile
from kvtuner.precision import (
    LAYOUT_ID,
    NATIVE_BITS,
    Granularity,
    PrecisionPair,
    bytes_per_token,
    effective_bits,
    mean_bits,
)
from kvtuner.quant import IDENTITY, Transform
from kvtuner.transforms import transform_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.evidence import ModelIdentity, QualityRecord
    from kvtuner.geometry import ModelGeometry

_NO_TRANSFORM: Final = str(IDENTITY.kind)


@dataclass(frozen=True, slots=True)
class LayerQuantization:
    """The storage of one layer, with the constants that it needs.

    Attributes:
        k_bits: The bits of the keys: 2, 4, 8 or 16.
        v_bits: The bits of the values: 2, 4, 8 or 16.
        k_transform: The keys' transform with its constants for all KV heads; the identity at 16 bits.
        v_transform: The values' transform, none or hadamard; the identity at 16 bits.
    """

    k_bits: int
    v_bits: int
    k_transform: Transform = IDENTITY
    v_transform: Transform = IDENTITY


@dataclass(frozen=True, slots=True)
class AskedBudget:
    """The budget of a search; what the layers reach is computed from them.

    Attributes:
        asked: The budget as the user wrote it, such as ``4bit``.
        tp_size: The number of tensor-parallel ranks that kept it.
        pp_size: The number of pipeline stages that kept it.
    """

    asked: str
    tp_size: int = 1
    pp_size: int = 1


def build_profile(
    *,
    geometry: ModelGeometry,
    layers: Sequence[LayerQuantization],
    k_group_size: int,
    v_group_size: int,
    symmetric: bool,
    model: ModelIdentity,
    budget: AskedBudget,
    quality: QualityRecord | None,
    provenance: Provenance,
    k_granularity: Granularity = "per_token",
) -> Profile:
    """Build a profile with its digest and its reached budget.

    Args:
        geometry: The geometry of the model.
        layers: The storage of every layer, in order.
        k_group_size: The channels per scale of keys; the tokens per scale of a channel where keys are per channel.
        v_group_size: The channels per scale of values.
        symmetric: Whether the grids of keys and values lie around zero.
        model: The identity of the measured model.
        budget: The budget of the search.
        quality: The measurements; None where there are none.
        provenance: The origin of the choices.
        k_granularity: The granularity of the keys; no server reads per_channel keys yet.

    Raises:
        ProfileError: choices that a profile cannot hold; names the layer.
        PrecisionError: bits or a group size that rows cannot hold.
    """
    if len(layers) != geometry.num_layers:
        raise ProfileError(f"geometry has num_layers {geometry.num_layers}, but {len(layers)} layers were chosen")
    k_fields = {"granularity": k_granularity, "group_size": k_group_size, "symmetric": symmetric}
    v_fields = {"granularity": "per_token", "group_size": v_group_size, "symmetric": symmetric}
    defaults = _defaults(layers, k_fields, v_fields)
    geometry_record = validated(GeometryRecord, geometry.as_dict(), place="geometry")
    records = tuple(_layer_record(number, layer, defaults) for number, layer in enumerate(layers))
    return Profile(
        schema_version=SCHEMA_VERSION,
        digest=digest_of(LAYOUT_ID, geometry_record, defaults, records),
        layout=LAYOUT_ID,
        model=model,
        geometry=geometry_record,
        defaults=defaults,
        layers=records,
        budget=_reached(budget, geometry, layers, defaults),
        quality=quality,
        provenance=provenance,
    )


def uniform_profile(
    geometry: ModelGeometry,
    pair: PrecisionPair,
    model: ModelIdentity,
    *,
    k_group_size: int | None = None,
    v_group_size: int | None = None,
    symmetric: bool = False,
    k_granularity: Granularity = "per_token",
) -> Profile:
    """Build a profile with the same widths in every layer, without transforms and measurements.

    Args:
        geometry: The geometry of the model.
        pair: The widths.
        model: The identity of the model.
        k_group_size: The channels per scale of keys, or the tokens per scale of a channel; head_dim by default.
        v_group_size: The channels per scale of values; v_head_dim by default.
        symmetric: Whether grids lie around zero.
        k_granularity: The granularity of the keys.

    Raises:
        PrecisionError: bits or a group size that rows cannot hold.
    """
    return build_profile(
        geometry=geometry,
        layers=[LayerQuantization(pair.k_bits, pair.v_bits)] * geometry.num_layers,
        k_group_size=geometry.head_dim if k_group_size is None else k_group_size,
        v_group_size=geometry.v_head_dim if v_group_size is None else v_group_size,
        symmetric=symmetric,
        k_granularity=k_granularity,
        model=model,
        budget=AskedBudget(str(pair)),
        quality=None,
        provenance=unsearched(),
    )


def unsearched() -> Provenance:
    """The provenance of a profile that no search chose."""
    return Provenance(
        kvtuner_version=__version__,
        calibration=None,
        search=None,
        libraries=Libraries(torch=torch.__version__, transformers="none", optuna="none"),
    )


def dump_profile(profile: Profile) -> bytes:
    """The bytes of a profile's file: indented UTF-8 JSON in the order of the format; equal profiles give equal bytes.

    Raises:
        ProfileError: the file would be larger than `load_profile` accepts.
    """
    document = profile.model_dump(mode="json", by_alias=True)
    data = (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    if len(data) > MAX_PROFILE_BYTES:
        raise ProfileError(
            f"a profile must be at most {MAX_PROFILE_BYTES} bytes, but this one has {len(data)};"
            " use transforms without mu and lambda in some layers"
        )
    return data


def _defaults(layers: Sequence[LayerQuantization], k_fields: dict[str, Any], v_fields: dict[str, Any]) -> Defaults:
    k_kinds = [str(layer.k_transform.kind) for layer in layers if layer.k_bits != NATIVE_BITS]
    v_kinds = [str(layer.v_transform.kind) for layer in layers if layer.v_bits != NATIVE_BITS]
    # What values cannot have is refused in its layer, by number, not here.
    v_kinds = [kind for kind in v_kinds if kind in transform_names("v")]
    fields = {
        "k": {**k_fields, "transform": _most_common(k_kinds)},
        "v": {**v_fields, "transform": _most_common(v_kinds)},
    }
    return validated(Defaults, fields, place="defaults")


def _most_common(kinds: Sequence[str]) -> str:
    """The most frequent kind, the first in the alphabet among equals; ``none`` of nothing."""
    counts = Counter(kinds)
    return min(counts, key=lambda name: (-counts[name], name), default=_NO_TRANSFORM)


def _layer_record(number: int, layer: LayerQuantization, defaults: Defaults) -> LayerRecord:
    fields = {
        "layer": number,
        "k": _side(layer.k_bits, layer.k_transform, defaults.k.transform),
        "v": _side(layer.v_bits, layer.v_transform, defaults.v.transform),
    }
    return validated(LayerRecord, fields, place=f"layers[{number}]")


def _side(bits: int, transform: Transform, default: str) -> dict[str, Any]:
    """One side of a layer as it stands in the file, its transform named only where the default differs."""
    name = str(transform.kind)
    fields: dict[str, Any] = {"bits": bits}
    if name != (_NO_TRANSFORM if bits == NATIVE_BITS else default):
        fields["transform"] = name
    for field, constant in (("mu", transform.mu), ("lambda", transform.lam)):
        if constant is not None:
            fields[field] = encode_fp16(constant)
    return fields


def _reached(
    budget: AskedBudget, geometry: ModelGeometry, layers: Sequence[LayerQuantization], defaults: Defaults
) -> BudgetRecord:
    pairs = [PrecisionPair(layer.k_bits, layer.v_bits) for layer in layers]
    shape = defaults.row_shape(geometry)
    fields = {
        "asked": budget.asked,
        "mean_bits": float(mean_bits(pairs, shape)),
        "effective_bits": float(effective_bits(pairs, shape)),
        "bytes_per_token": bytes_per_token(pairs, shape),
        "tp_size": budget.tp_size,
        "pp_size": budget.pp_size,
    }
    return validated(BudgetRecord, fields, place="budget")
