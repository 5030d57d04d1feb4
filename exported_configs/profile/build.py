"""A profile built from a search's choices, and its file. Knows nothing of how the choices were made."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from kvtuner import __version__
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.digest import hashed_content
from kvtuner.exported_configs.profile.document import validated
from kvtuner.exported_configs.profile.field_types import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.layer_storage import Defaults, GeometryRecord, LayerRecord, encode_fp16
from kvtuner.exported_configs.profile.profile import FIT_VERSION, Profile, first_version, reached_figures
from kvtuner.exported_configs.profile.records import BudgetRecord, Libraries, ModelIdentity, Provenance, QualityRecord
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import (
    LAYOUT_ID,
    NATIVE_BITS,
    NO_WINDOW,
    ExactWindow,
    Fit,
    Granularity,
    PrecisionPair,
    Side,
)
from kvtuner.quant import IDENTITY, Transform
from kvtuner.run_folder import sha256_of
from kvtuner.transforms import transform_names

_NO_TRANSFORM: Final = str(IDENTITY.kind)


@dataclass(frozen=True, slots=True)
class LayerQuantization:
    """One layer that a profile is built from: its widths, and its transforms with their constants for all KV heads.

    A side of 16 bits has the identity. Values have no transform, or hadamard.
    """

    k_bits: int
    v_bits: int
    k_transform: Transform = IDENTITY
    v_transform: Transform = IDENTITY


@dataclass(frozen=True, slots=True)
class AskedBudget:
    """The budget of a search as the user wrote it, such as ``4bit``, and the ranks and stages that kept it."""

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
    quality: QualityRecord | None = None,
    provenance: Provenance | None = None,
    k_granularity: Granularity = "per_token",
    fit: Fit = "minmax",
    window: ExactWindow = NO_WINDOW,
) -> Profile:
    """Build a profile with its digest and its reached budget.

    A group size is the number of channels per scale; of per_channel keys, which no server reads yet, it is the number
    of tokens per scale of a channel. Symmetric grids lie around zero. Without a quality nothing was measured, without a
    provenance no search chose.
    A profile of min-max grids without 3 bits and without a window is of version 1, which older readers take too.

    A `ProfileError` names the layer whose choice a profile cannot hold; bits or a group size that rows cannot hold are
    a `PrecisionError`.
    """
    if len(layers) != geometry.num_layers:
        raise ProfileError(f"geometry has num_layers {geometry.num_layers}, but {len(layers)} layers were chosen")
    keys = {"granularity": k_granularity, "group_size": k_group_size, "transform": _usual_transform(layers, "k")}
    values = {"granularity": "per_token", "group_size": v_group_size, "transform": _usual_transform(layers, "v")}
    widths = (bits for layer in layers for bits in (layer.k_bits, layer.v_bits))
    version = first_version(widths, fit, window)
    grid = {"symmetric": symmetric} if version < FIT_VERSION else {"symmetric": symmetric, "fit": fit}
    fields = {"k": {**keys, **grid}, "v": {**values, **grid}}
    defaults = validated(Defaults, fields, place="defaults")
    geometry_record = validated(GeometryRecord, geometry.as_dict(), place="geometry")
    records = tuple(_layer_record(number, layer, defaults) for number, layer in enumerate(layers))
    pairs = [PrecisionPair(layer.k_bits, layer.v_bits) for layer in layers]
    figures = reached_figures(pairs, defaults.row_shape(geometry))
    return Profile(
        schema_version=version,
        digest=sha256_of(hashed_content(LAYOUT_ID, geometry_record, defaults, records, window)),
        layout=LAYOUT_ID,
        model=model,
        geometry=geometry_record,
        defaults=defaults,
        residual_length=window.residual_length or None,
        sinks=window.sinks or None,
        layers=records,
        budget=validated(BudgetRecord, {**asdict(budget), **figures}, place="budget"),
        quality=quality,
        provenance=provenance or _unsearched(),
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
    fit: Fit = "minmax",
    window: ExactWindow = NO_WINDOW,
) -> Profile:
    """Build a profile with the same widths in every layer, without transforms and measurements.

    Group sizes are those of `build_profile`, and so are errors; by default all channels of a head share a scale.
    """
    return build_profile(
        geometry=geometry,
        layers=[LayerQuantization(pair.k_bits, pair.v_bits)] * geometry.num_layers,
        k_group_size=geometry.head_dim if k_group_size is None else k_group_size,
        v_group_size=geometry.v_head_dim if v_group_size is None else v_group_size,
        symmetric=symmetric,
        k_granularity=k_granularity,
        fit=fit,
        window=window,
        model=model,
        budget=AskedBudget(str(pair)),
    )


def _unsearched() -> Provenance:
    return Provenance(
        kvtuner_version=__version__,
        calibration=None,
        search=None,
        libraries=Libraries(torch=torch.__version__, transformers="none", optuna="none"),
    )


def dump_profile(profile: Profile) -> bytes:
    """The bytes of a profile's file: indented UTF-8 JSON in the order of the format; equal profiles give equal bytes.

    A file larger than `load_profile` accepts is a `ProfileError`.
    """
    document = profile.model_dump(mode="json", by_alias=True)
    data = (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    if len(data) > MAX_PROFILE_BYTES:
        raise ProfileError(
            f"a profile must be at most {MAX_PROFILE_BYTES} bytes, but this one has {len(data)};"
            " use transforms without mu and lambda in some layers"
        )
    return data


def _usual_transform(layers: Sequence[LayerQuantization], side: Side) -> str:
    """The most frequent transform of packed layers, the first in the alphabet among equals; ``none`` without any."""
    bits_and_transforms = [
        (layer.k_bits, layer.k_transform) if side == "k" else (layer.v_bits, layer.v_transform) for layer in layers
    ]
    names = (str(transform.kind) for bits, transform in bits_and_transforms if bits != NATIVE_BITS)
    # What values cannot have is refused in its layer, by number, not here.
    counts = Counter(name for name in names if name in transform_names(side))
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
