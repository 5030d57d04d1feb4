"""Two profiles and what differs, as facts. Knows nothing of files."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import to_jsonable_python

from kvtuner.precision import NATIVE_BITS, SIDES, tokens_per_gib
from kvtuner.report.layer_strip import PER_CHANNEL
from kvtuner.report.profile_report import ratio_to_bf16

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import QualityRecord

CONSTANTS: Final = ("constants",)
DEFAULTS: Final = ("granularity", "group_size", "symmetric")


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer of a compared profile: 16-bit keys have no granularity; constants are the base64 of mu and lambda."""

    pair: str
    k_transform: str
    v_transform: str
    k_granularity: str | None
    constants: tuple[str | None, str | None]

    def __str__(self) -> str:
        keys = PER_CHANNEL if self.k_granularity == "per_channel" else self.k_transform
        return f"{self.pair} {keys}/{self.v_transform}"


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A layer that the two profiles store differently.

    Attributes:
        changed: Some of ``bits``, ``granularity`` of keys that are quantized in both, ``transform``, and
            ``constants`` of one and the same transform.
    """

    layer: int
    first: LayerState
    second: LayerState
    changed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QualityDifference:
    """The measured qualities of two profiles; None where nothing was measured.

    Attributes:
        apart: The circumstances that the measurements do not share, or may not; empty where the tokens are the same.
        intervals_overlap: Whether the intervals overlap; None where one was not measured.
    """

    first: QualityRecord | None
    second: QualityRecord | None
    apart: tuple[str, ...]
    intervals_overlap: bool | None

    @property
    def is_comparable(self) -> bool:
        """Whether both were measured, and alike."""
        return self.intervals_overlap is not None and not self.apart

    def text(self) -> str:
        """The sentence that compares the two measurements."""
        if self.first is None or self.second is None:
            missing = [name for name, record in (("first", self.first), ("second", self.second)) if record is None]
            return f"not measured of the {' and the '.join(missing)}: nothing to compare"
        overlap = "the intervals overlap" if self.intervals_overlap else "the intervals do not overlap"
        if self.apart:
            return f"not comparable, since these differ or are not known: {', '.join(self.apart)} ({overlap})"
        if self.intervals_overlap:
            return f"measured on the same tokens; {overlap}, which shows neither to be better"
        better = "first" if self.first.measured_kl.mean < self.second.measured_kl.mean else "second"
        return f"measured on the same tokens; {overlap}: the {better} is better"


@dataclass(frozen=True, slots=True)
class ProfileDifference:
    """Two profiles and everything in which they differ.

    Attributes:
        geometry: The counts of the models that differ, with both values.
        defaults: The settings of all layers that differ, such as ``k.group_size``, with both values.
        layers: The layers that changed; None where the models have not the same number of layers.
    """

    first: Profile
    second: Profile
    geometry: dict[str, tuple[int, int]]
    defaults: dict[str, tuple[Any, Any]]
    layers: tuple[LayerChange, ...] | None
    quality: QualityDifference

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; pairs hold the first profile's and the second's."""
        both = (self.first, self.second)
        kls = [None if p.quality is None else p.quality.measured_kl for p in both]
        return {
            "same_digest": self.first.digest == self.second.digest,
            "digest": [p.digest for p in both],
            "model": [p.model.id for p in both],
            "geometry": {name: list(values) for name, values in self.geometry.items()},
            "k_granularity": [p.defaults.k.granularity for p in both],
            "defaults_differ": bool(self.defaults),
            "defaults": {name: list(values) for name, values in self.defaults.items()},
            "layers_compared": self.layers is not None,
            "layers": to_jsonable_python(self.layers or ()),
            "mean_bits": [float(p.mean_bits) for p in both],
            "effective_bits": [round(float(p.effective_bits), 6) for p in both],
            "bytes_per_token": [p.bytes_per_token() for p in both],
            "tokens_per_gib": [tokens_per_gib(p.bytes_per_token()) for p in both],
            "ratio_to_bf16": [round(ratio_to_bf16(p), 4) for p in both],
            "bytes_ratio": round(self.second.bytes_per_token() / self.first.bytes_per_token(), 6),
            "kl": [None if kl is None else kl.mean for kl in kls],
            "quality": {
                "measured_kl": [None if kl is None else kl.model_dump() for kl in kls],
                "comparable": self.quality.is_comparable,
                "apart": list(self.quality.apart),
                "intervals_overlap": self.quality.intervals_overlap,
            },
        }


def difference_of(first: Profile, second: Profile) -> ProfileDifference:
    """Everything in which two profiles differ that a server or a user would notice."""
    counts, others = first.to_geometry().as_dict(), second.to_geometry().as_dict()
    geometry = {name: (value, others[name]) for name, value in counts.items() if value != others[name]}
    return ProfileDifference(
        first,
        second,
        geometry,
        _defaults(first, second),
        None if "num_layers" in geometry else _changes(first, second, with_constants=not geometry),
        _quality(first, second),
    )


def _defaults(first: Profile, second: Profile) -> dict[str, tuple[Any, Any]]:
    """The defaults of keys and values that differ, without the transform, which is compared layer by layer."""
    names = [f"{side}.{name}" for side in SIDES for name in DEFAULTS]
    pairs = {name: (attrgetter(name)(first.defaults), attrgetter(name)(second.defaults)) for name in names}
    return {name: (before, after) for name, (before, after) in pairs.items() if before != after}


def _changes(first: Profile, second: Profile, *, with_constants: bool) -> tuple[LayerChange, ...]:
    """The layers that changed; where heads or channels differ, constants cannot be the same and are not compared."""
    changes = []
    for layer in range(len(first.pairs)):
        before, after = _state(first, layer), _state(second, layer)
        granularities = (before.k_granularity, after.k_granularity)
        same_kind = before.k_transform == after.k_transform
        differs = {
            "bits": before.pair != after.pair,
            "granularity": None not in granularities and granularities[0] != granularities[1],
            "transform": not same_kind or before.v_transform != after.v_transform,
            "constants": with_constants and same_kind and before.constants != after.constants,
        }
        if any(differs.values()):
            changed = tuple(name for name, is_so in differs.items() if is_so)
            changes.append(LayerChange(layer, before, after, changed))
    return tuple(changes)


def _state(profile: Profile, layer: int) -> LayerState:
    keys = profile.layers[layer].k
    return LayerState(
        str(profile.pairs[layer]),
        str(profile.transform_name(layer, "k")),
        str(profile.transform_name(layer, "v")),
        None if keys.bits == NATIVE_BITS else profile.defaults.k.granularity,
        (keys.mu.data if keys.mu else None, keys.lam.data if keys.lam else None),
    )


def _quality(first: Profile, second: Profile) -> QualityDifference:
    one, other = first.quality, second.quality
    if one is None or other is None:
        return QualityDifference(one, other, (), None)
    a, b = one.measured_kl, other.measured_kl
    same_weights = first.model.checkpoint_sha256 == second.model.checkpoint_sha256 is not None
    circumstances = _circumstances(first, one, same_weights=same_weights)
    others = _circumstances(second, other, same_weights=same_weights)
    apart = tuple(name for name, value in circumstances.items() if value is None or value != others[name])
    return QualityDifference(one, other, apart, a.low <= b.high and b.low <= a.high)


def _circumstances(profile: Profile, quality: QualityRecord, *, same_weights: bool) -> dict[str, Any]:
    """The facts that two measurements of the same tokens, read alike by the same model, share; None is not known.

    Where the weights are known to be the same, it makes no difference what the model is called.
    """
    model, record = profile.model, profile.provenance.calibration
    names = {"id", "revision"} if same_weights else set()
    return {
        "model": (model.model_dump(exclude={"dtype", "max_positions", *names}), profile.geometry),
        "dtype": model.dtype,
        "read plan": quality.read_plan,
        "report text": None if record is None else (record.token_ids_sha256.report, quality.split_tokens),
        "positions": None if record is None else record.position_range,
    }
