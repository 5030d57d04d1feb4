"""In what two profiles differ: layers, bytes, quality, and whether that can be compared. Prints nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtuner.precision import NATIVE_BITS, tokens_per_gib
from kvtuner.report.layer_codes import PER_CHANNEL
from kvtuner.report.profile_report import ratio_to_bf16

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.arrays import Fp16Array
    from kvtuner.exported_configs.profile.evidence import QualityRecord
    from kvtuner.exported_configs.profile.profile import Profile

CONSTANTS: Final = ("constants",)
DEFAULTS: Final = ("granularity", "group_size", "symmetric")


@dataclass(frozen=True, slots=True)
class LayerState:
    """How one layer is stored.

    Attributes:
        pair: such as ``K8V4``.
        k_transform: of keys.
        v_transform: of values.
        k_granularity: of keys; None at 16 bits.
        constants: base64 of mu and lambda; None where the transform has none.
    """

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
    """A layer that is stored otherwise.

    Attributes:
        layer: its global id.
        first: in the first profile.
        second: in the second.
        what: some of ``bits``, ``granularity`` of keys that are quantized in both, ``transform``, and ``constants`` of
            one and the same transform.
    """

    layer: int
    first: LayerState
    second: LayerState
    what: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class QualityDifference:
    """Two measured KLs.

    Attributes:
        first: None where nothing was measured.
        second: likewise.
        apart: what the measurements do not share, or what of it is not known; of nothing, they are of the same tokens.
        intervals_overlap: None where one was not measured.
    """

    first: QualityRecord | None
    second: QualityRecord | None
    apart: tuple[str, ...]
    intervals_overlap: bool | None

    @property
    def is_comparable(self) -> bool:
        """Whether both were measured, and alike."""
        return self.intervals_overlap is not None and not self.apart

    def words(self) -> str:
        """What may be said of them."""
        if self.intervals_overlap is None:
            missing = [name for name, each in (("first", self.first), ("second", self.second)) if each is None]
            return f"not measured of the {' and the '.join(missing)}: nothing to compare"
        overlap = "the intervals overlap" if self.intervals_overlap else "the intervals do not overlap"
        if self.apart:
            return f"not comparable, since these differ or are not known: {', '.join(self.apart)} ({overlap})"
        if self.intervals_overlap:
            return f"measured on the same tokens; {overlap}, which shows neither to be better"
        assert self.first is not None and self.second is not None
        better = "first" if self.first.measured_kl.mean < self.second.measured_kl.mean else "second"
        return f"measured on the same tokens; {overlap}: the {better} is better"


@dataclass(frozen=True, slots=True)
class ProfileDifference:
    """All of it.

    Attributes:
        first: one profile.
        second: the other.
        geometry: counts of the models that differ, both values.
        defaults: what all layers share that differs, such as ``k.group_size``, both values.
        layers: those that changed; None where the models have not the same number of layers.
        quality: measured KL.
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
        quality = self.quality
        return {
            "same_digest": self.first.digest == self.second.digest,
            "digest": [p.digest for p in both],
            "model": [p.model.id for p in both],
            "geometry": {name: list(values) for name, values in self.geometry.items()},
            "k_granularity": [p.defaults.k.granularity for p in both],
            "defaults_differ": bool(self.defaults),
            "defaults": {name: list(values) for name, values in self.defaults.items()},
            "layers_compared": self.layers is not None,
            "layers": [_change_json(change) for change in self.layers or ()],
            "mean_bits": [float(p.mean_bits) for p in both],
            "effective_bits": [round(float(p.effective_bits), 6) for p in both],
            "bytes_per_token": [p.bytes_per_token() for p in both],
            "tokens_per_gib": [tokens_per_gib(p.bytes_per_token()) for p in both],
            "ratio_to_bf16": [round(ratio_to_bf16(p), 4) for p in both],
            "bytes_ratio": round(self.second.bytes_per_token() / self.first.bytes_per_token(), 6),
            "kl": [None if p.quality is None else p.quality.measured_kl.mean for p in both],
            "quality": {
                "measured_kl": [None if p.quality is None else p.quality.measured_kl.model_dump() for p in both],
                "comparable": quality.is_comparable,
                "apart": list(quality.apart),
                "intervals_overlap": quality.intervals_overlap,
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
    """What a layer may say for itself, its transform, is compared layer by layer."""
    pairs = {
        f"{side}.{name}": (getattr(before, name), getattr(after, name))
        for side, before, after in (
            ("k", first.defaults.k, second.defaults.k),
            ("v", first.defaults.v, second.defaults.v),
        )
        for name in DEFAULTS
    }
    return {name: (before, after) for name, (before, after) in pairs.items() if before != after}


def _changes(first: Profile, second: Profile, *, with_constants: bool) -> tuple[LayerChange, ...]:
    """Where heads or channels differ, constants cannot be the same, and are not compared."""
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
            what = tuple(name for name, is_so in differs.items() if is_so)
            changes.append(LayerChange(layer, before, after, what))
    return tuple(changes)


def _state(profile: Profile, layer: int) -> LayerState:
    keys = profile.layers[layer].k
    return LayerState(
        str(profile.pairs[layer]),
        str(profile.transform_name(layer, "k")),
        str(profile.transform_name(layer, "v")),
        None if keys.bits == NATIVE_BITS else profile.defaults.k.granularity,
        (_data(keys.mu), _data(keys.lam)),
    )


def _data(array: Fp16Array | None) -> str | None:
    return None if array is None else array.data


def _quality(first: Profile, second: Profile) -> QualityDifference:
    one, other = first.quality, second.quality
    if one is None or other is None:
        return QualityDifference(one, other, (), None)
    a, b = one.measured_kl, other.measured_kl
    same_weights = first.model.checkpoint_sha256 == second.model.checkpoint_sha256 is not None
    circumstances, others = (
        _circumstances(profile, quality, same_weights=same_weights)
        for profile, quality in ((first, one), (second, other))
    )
    apart = tuple(name for name, value in circumstances.items() if value is None or value != others[name])
    return QualityDifference(one, other, apart, a.low <= b.high and b.low <= a.high)


def _circumstances(profile: Profile, quality: QualityRecord, *, same_weights: bool) -> dict[str, Any]:
    """What two measurements must share to be of the same tokens, read alike by the same model; None is not known.

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


def _change_json(change: LayerChange) -> dict[str, Any]:
    return {
        "layer": change.layer,
        "first": _state_json(change.first),
        "second": _state_json(change.second),
        "changed": list(change.what),
    }


def _state_json(state: LayerState) -> dict[str, Any]:
    return {
        "pair": state.pair,
        "k_transform": state.k_transform,
        "v_transform": state.v_transform,
        "k_granularity": state.k_granularity,
        "constants": list(state.constants),
    }
