"""A profile built from a search's choices, and its file. Knows nothing of how the choices were made."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner import __version__
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.constants_file import (
    MAX_INLINE_CHARS,
    arrays_of,
    constants_hash,
    constants_path,
    encode_constants,
)
from kvtuner.exported_configs.profile.digest import hashed_content
from kvtuner.exported_configs.profile.document import validated
from kvtuner.exported_configs.profile.field_types import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.geometry_record import GeometryRecord
from kvtuner.exported_configs.profile.layer_sizes import LayerSizes
from kvtuner.exported_configs.profile.layer_storage import Defaults, LayerRecord, SideDefaults, encode_fp16
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.profile.records import BudgetRecord, Libraries, ModelIdentity, Provenance, QualityRecord
from kvtuner.exported_configs.profile.versions import SECOND_VERSION, SECOND_VERSION_QUALITY, first_version
from kvtuner.geometry import ModelGeometry
from kvtuner.layer_geometry import CacheGeometry
from kvtuner.precision import (
    LAYOUT_ID,
    NATIVE_BITS,
    NO_WINDOW,
    WHOLE_HEADS,
    WIDE_WORD_BITS,
    ConstantsPlace,
    ExactWindow,
    Fit,
    PrecisionPair,
    ScaleLayout,
    Side,
)
from kvtuner.run_folder import sha256_of, write_atomically, write_together
from kvtuner.transforms import TRANSFORMS, transform_names

if TYPE_CHECKING:
    from kvtuner.quant import Transform

_NO_TRANSFORM: Final = str(TRANSFORMS["none"])


def _identity() -> "Transform":
    from kvtuner.quant import IDENTITY  # brings torch, which whoever only writes a profile again does not need

    return IDENTITY


@dataclass(frozen=True, slots=True)
class LayerQuantization:
    """One layer that a profile is built from: its widths, and its transforms with their constants for all KV heads.

    A side of 16 bits has the identity. Values have no transform, or hadamard. A latent has the bits of keys alone.
    Group sizes are those of the profile where they are None.
    """

    k_bits: int
    v_bits: int | None
    k_transform: "Transform" = field(default_factory=_identity)
    v_transform: "Transform" = field(default_factory=_identity)
    k_group_size: int | None = None
    v_group_size: int | None = None


@dataclass(frozen=True, slots=True)
class AskedBudget:
    """The budget of a search as the user wrote it, such as ``4bit``, and the ranks and stages that kept it."""

    asked: str
    tp_size: int = 1
    pp_size: int = 1


def build_profile(
    *,
    geometry: ModelGeometry | CacheGeometry,
    layers: Sequence[LayerQuantization],
    model: ModelIdentity,
    budget: AskedBudget,
    k_layout: ScaleLayout = WHOLE_HEADS,
    v_layout: ScaleLayout = WHOLE_HEADS,
    symmetric: bool = False,
    fit: Fit = "minmax",
    window: ExactWindow = NO_WINDOW,
    quality: QualityRecord | None = None,
    provenance: Provenance | None = None,
) -> Profile:
    """Build a profile with its digest and its reached budget.

    Groups of whole heads are of the most frequent head size; per_channel keys need a window of at least a group.
    Symmetric grids lie around zero. Without a quality nothing was measured, without a provenance no search chose.
    Layers are those that own a cache, in their order. A profile is of version 1, which older readers take too, where
    layers are all full and alike, with one group size, min-max grids, words of 32 bits, no 3 bits and no window. Its
    constants stand in its own file; `place_constants` moves them.

    A `ProfileError` names the layer whose choice a profile cannot hold; bits or a group size that rows cannot hold are
    a `PrecisionError`.
    """
    geometry_record = validated(GeometryRecord, GeometryRecord.fields_of(geometry), place="geometry")
    owners = geometry_record.owners()
    if len(layers) != len(owners):
        raise ProfileError(f"geometry has num_layers {len(owners)}, but {len(layers)} layers were chosen")
    # A latent has no values: their group, which nothing reads, stands in the file as that of latents.
    k_layout = k_layout.of_head(geometry_record.head_dim)
    if geometry_record.v_head_dim:
        v_layout = v_layout.of_head(geometry_record.v_head_dim)
    else:
        v_layout = replace(v_layout, group_size=k_layout.group_size)
    grid = {"symmetric": symmetric, "fit": fit}
    fields = {
        "k": {**_layout(k_layout), "transform": _usual_transform(layers, "k"), **grid},
        "v": {**_layout(v_layout), "transform": _usual_transform(layers, "v"), **grid},
    }
    defaults = validated(Defaults, fields, place="defaults")
    records = tuple(_layer_record(number, layer, defaults) for number, layer in zip(owners, layers, strict=True))
    exact = {"residual_length": window.residual_length or None, "sinks": window.sinks or None}
    version, defaults = first_version(geometry_record, defaults, records, **exact)
    figures = LayerSizes.of(geometry_record, defaults, records).reached_figures()
    return Profile(
        schema_version=version,
        digest=sha256_of(hashed_content(LAYOUT_ID, geometry_record, defaults, records, window)),
        layout=LAYOUT_ID,
        model=model,
        geometry=geometry_record,
        defaults=defaults,
        residual_length=exact["residual_length"],
        sinks=exact["sinks"],
        layers=records,
        budget=validated(BudgetRecord, {**asdict(budget), **figures}, place="budget"),
        quality=_quality_of(version, quality),
        provenance=provenance or _unsearched(),
    )


def of_whole_model(
    cache: CacheGeometry, tuned: Sequence[LayerQuantization]
) -> tuple[ModelGeometry | CacheGeometry, list[LayerQuantization]]:
    """The geometry and the layers that a profile is built from, of its tuned layers in their order.

    Other layers that own a cache keep the served dtype. A latent has one width, that of keys and of values alike; two
    are a `PrecisionError`.
    """
    geometry = cache.tuned()
    if geometry.is_latent:
        tuned = [_of_latent(layer, geometry) for layer in tuned]
    if geometry.layer_ids is None and not cache.index_bytes():
        return geometry, list(tuned)
    chosen = dict(zip(geometry.ids, tuned, strict=True))
    native = LayerQuantization(NATIVE_BITS, NATIVE_BITS)
    return cache, [chosen.get(layer_id, native) for layer_id in cache.owners]


def _of_latent(layer: LayerQuantization, geometry: ModelGeometry) -> LayerQuantization:
    if layer.v_bits is not None:
        geometry.widths(PrecisionPair(layer.k_bits, layer.v_bits))
    return replace(layer, v_bits=None, v_transform=_identity(), v_group_size=None)


def uniform_profile(
    geometry: ModelGeometry | CacheGeometry,
    pair: PrecisionPair,
    model: ModelIdentity,
    *,
    k_layout: ScaleLayout = WHOLE_HEADS,
    v_layout: ScaleLayout = WHOLE_HEADS,
    symmetric: bool = False,
    fit: Fit = "minmax",
    window: ExactWindow = NO_WINDOW,
) -> Profile:
    """Build a profile with the same widths in every tuned layer, without transforms and measurements.

    Errors are those of `build_profile`.
    """
    cache = CacheGeometry.of(geometry) if isinstance(geometry, ModelGeometry) else geometry
    tuned = [LayerQuantization(pair.k_bits, pair.v_bits)] * cache.tuned().num_layers
    whole, layers = of_whole_model(cache, tuned)
    return build_profile(
        geometry=geometry if isinstance(geometry, ModelGeometry) else whole,
        layers=layers,
        k_layout=k_layout,
        v_layout=v_layout,
        symmetric=symmetric,
        fit=fit,
        window=window,
        model=model,
        budget=AskedBudget(str(pair)),
    )


def _layout(layout: ScaleLayout) -> dict[str, Any]:
    """A scale layout as the fields of defaults; what version 1 has alone where words are wide."""
    words = {} if layout.word_bits == WIDE_WORD_BITS else {"word_bits": layout.word_bits}
    return {"granularity": layout.granularity, "group_size": layout.group_size, **words}


def _unsearched() -> Provenance:
    import torch

    return Provenance(
        kvtuner_version=__version__,
        calibration=None,
        search=None,
        libraries=Libraries(torch=torch.__version__, transformers="none", optuna="none"),
    )


def dump_profile(profile: Profile) -> bytes:
    """The bytes of a profile's file: indented UTF-8 JSON in the order of the format; equal profiles give equal bytes.

    A file larger than `load_profile` accepts is a `ProfileError`. Constants of a side file are left to it.
    """
    document = profile.model_dump(mode="json", by_alias=True)
    if profile.constants_sha256 is not None:
        for layer in document["layers"]:
            for name in ("mu", "lambda"):
                layer["k"].pop(name, None)
    data = (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    if len(data) > MAX_PROFILE_BYTES:
        raise ProfileError(
            f"a profile must be at most {MAX_PROFILE_BYTES} bytes, but this one has {len(data)};"
            " keep its constants in a side file (--constants file)"
        )
    return data


def dump_constants(profile: Profile) -> bytes | None:
    """The bytes of a profile's side file; None where its own file holds its constants."""
    return None if profile.constants_sha256 is None else encode_constants(arrays_of(profile.layers))


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile with its side file; that of an older profile at the same path is replaced or removed."""
    write_files(path, dump_profile(profile), dump_constants(profile))


def write_files(path: Path, data: bytes, side_file: bytes | None) -> None:
    """Write the bytes of a profile's file and of its side file over those of an older profile, if there are any.

    A profile that cannot be written leaves the older one whole. Two names cannot change at once: between the renaming
    of one file and that of the other, or the removal of an older side file, a reader sees one file of each profile.
    `load_profile` refuses such a pair, and says how a writer that was killed there is made good.
    """
    if side_file is None:
        write_atomically(path, data)
        constants_path(path).unlink(missing_ok=True)
    else:  # where nothing was, a side file alone is no profile yet
        write_together({constants_path(path): side_file, path: data})


def place_constants(profile: Profile, place: ConstantsPlace) -> Profile:
    """The same profile with its constants in a side file or in its own, under the digest and version of that."""
    arrays = arrays_of(profile.layers)
    is_large = sum(len(array.data) for array in arrays.values()) > MAX_INLINE_CHARS
    in_file = bool(arrays) and (place == "file" or (place == "auto" and is_large))
    if in_file == (profile.constants_sha256 is not None):
        return profile
    side_hash = constants_hash(profile.layers) if in_file else None
    exact = {"residual_length": profile.residual_length, "sinks": profile.sinks}
    version, defaults = first_version(
        profile.geometry, profile.defaults, profile.layers, **exact, constants_sha256=side_hash
    )
    content = hashed_content(profile.layout, profile.geometry, defaults, profile.layers, profile.window, side_hash)
    changes = {"schema_version": version, "digest": sha256_of(content), "constants_sha256": side_hash}
    changes |= {"defaults": defaults, "quality": _quality_of(version, profile.quality)}
    return Profile(**{**dict(profile), **changes})


def _quality_of(version: int, quality: QualityRecord | None) -> QualityRecord | None:
    """A quality with the fields that a version has."""
    if quality is None or version >= SECOND_VERSION:
        return quality
    return quality.model_copy(update=dict.fromkeys(SECOND_VERSION_QUALITY))


def _usual_transform(layers: Sequence[LayerQuantization], side: Side) -> str:
    """The most frequent transform of packed layers, the first in the alphabet among equals; ``none`` without any."""
    bits_and_transforms = [
        (layer.k_bits, layer.k_transform) if side == "k" else (layer.v_bits, layer.v_transform) for layer in layers
    ]
    names = (str(transform.kind) for bits, transform in bits_and_transforms if bits not in (None, NATIVE_BITS))
    # What values cannot have is refused in its layer, by number, not here.
    counts = Counter(name for name in names if name in transform_names(side))
    return min(counts, key=lambda name: (-counts[name], name), default=_NO_TRANSFORM)


def _layer_record(number: int, layer: LayerQuantization, defaults: Defaults) -> LayerRecord:
    fields = {"layer": number, "k": _side(layer.k_bits, layer.k_transform, layer.k_group_size, defaults.k)}
    if layer.v_bits is not None:
        fields["v"] = _side(layer.v_bits, layer.v_transform, layer.v_group_size, defaults.v)
    return validated(LayerRecord, fields, place=f"layers[{number}]")


def _side(bits: int, transform: "Transform", group_size: int | None, defaults: SideDefaults) -> dict[str, Any]:
    """One side of a layer as it stands in the file, its transform and group named only where the default differs."""
    name = str(transform.kind)
    fields: dict[str, Any] = {"bits": bits}
    if name != (_NO_TRANSFORM if bits == NATIVE_BITS else defaults.transform):
        fields["transform"] = name
    if group_size not in (None, defaults.group_size) and bits != NATIVE_BITS:
        fields["group_size"] = group_size
    for name, constant in (("mu", transform.mu), ("lambda", transform.lam)):
        if constant is not None:
            fields[name] = encode_fp16(constant)
    return fields
