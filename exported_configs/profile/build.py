"""Making a profile of what a search chose, and writing it down. Knows nothing of how the choice was made."""

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
    """What a search chose for one layer.

    Attributes:
        k_bits: 2, 4, 8 or 16.
        v_bits: 2, 4, 8 or 16.
        k_transform: with its constants for all KV heads; the identity at 16 bits.
        v_transform: none or hadamard; the identity at 16 bits.
    """

    k_bits: int
    v_bits: int
    k_transform: Transform = IDENTITY
    v_transform: Transform = IDENTITY


@dataclass(frozen=True, slots=True)
class AskedBudget:
    """The budget as it was asked for; what it reaches is computed from the layers.

    Attributes:
        asked: such as ``4bit``.
        tp_size: tensor-parallel ranks that it was kept on.
        pp_size: pipeline stages that it was kept on.
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
        geometry: of the model.
        layers: one choice per layer, in order.
        k_group_size: channels per scale of keys; tokens per scale of a channel if keys are per channel.
        v_group_size: channels per scale of values.
        symmetric: grids around zero, for keys and values.
        model: which model was measured.
        budget: what was asked for.
        quality: what was measured; None if nothing was.
        provenance: where the choices come from.
        k_granularity: per_channel profiles are kept and shown, but no host serves them yet.

    Raises:
        ProfileError: choices that a profile cannot hold; names the layer.
        PrecisionError: bits or a group size that rows cannot hold.
    """
    if len(layers) != geometry.num_layers:
        raise ProfileError(f"geometry has num_layers {geometry.num_layers}, but {len(layers)} layers were chosen")
    k_fields = {"granularity": k_granularity, "group_size": k_group_size, "symmetric": symmetric}
    v_fields = {"granularity": "per_token", "group_size": v_group_size, "symmetric": symmetric}
    defaults = _defaults(layers, k_fields, v_fields)
    stored_geometry = validated(GeometryRecord, geometry.as_dict(), place="geometry")
    stored = tuple(_stored_layer(number, choice, defaults) for number, choice in enumerate(layers))
    return Profile(
        schema_version=SCHEMA_VERSION,
        digest=digest_of(LAYOUT_ID, stored_geometry, defaults, stored),
        layout=LAYOUT_ID,
        model=model,
        geometry=stored_geometry,
        defaults=defaults,
        layers=stored,
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
    """A profile with the same widths in every layer and no transforms; nothing was measured.

    Args:
        geometry: of the model.
        pair: the widths.
        model: which model it is.
        k_group_size: channels per scale of keys, or tokens per scale of a channel; head_dim by default.
        v_group_size: channels per scale of values; v_head_dim by default.
        symmetric: grids around zero.
        k_granularity: of the keys.

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
    """Of a profile that no search chose."""
    return Provenance(
        kvtuner_version=__version__,
        calibration=None,
        search=None,
        libraries=Libraries(torch=torch.__version__, transformers="none", optuna="none"),
    )


def dump_profile(profile: Profile) -> bytes:
    """The file of a profile: indented UTF-8 JSON in the order of the format; equal profiles give equal bytes.

    Raises:
        ProfileError: larger than what `load_profile` accepts.
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
    k_kinds = [str(choice.k_transform.kind) for choice in layers if choice.k_bits != NATIVE_BITS]
    v_kinds = [str(choice.v_transform.kind) for choice in layers if choice.v_bits != NATIVE_BITS]
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


def _stored_layer(number: int, choice: LayerQuantization, defaults: Defaults) -> LayerRecord:
    fields = {
        "layer": number,
        "k": _side(choice.k_bits, choice.k_transform, defaults.k.transform),
        "v": _side(choice.v_bits, choice.v_transform, defaults.v.transform),
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
    pairs = [PrecisionPair(choice.k_bits, choice.v_bits) for choice in layers]
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
