"""Two profiles side by side: what differs, as facts, text for a terminal and a page. Knows nothing of files."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import to_jsonable_python

from kvtuner.precision import NATIVE_BITS, SIDES, tokens_per_gib
from kvtuner.report.formatting import NOT_MEASURED, Table, count, fixed, interval, percent, printable
from kvtuner.report.layer_strip import PER_CHANNEL, Track, indented, legend, profile_layers, strip_lines, tracks
from kvtuner.report.profile_report import ratio_to_bf16

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.evidence import QualityRecord
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.report.layer_strip import Terminal

CONSTANTS: Final = ("constants",)
FACTS: Final = ("mean_bits", "effective_bits", "bytes_per_token", "tokens_per_gib", "ratio_to_bf16")
MARKS: Final = "^=other bits, transform or granularity  ~=other constants only"
QUALITY: Final = ("KL [95%]", "top-1 as the unquantized model", "perplexity", "unquantized", "read plan")
DEFAULTS: Final = ("granularity", "group_size", "symmetric")


@dataclass(frozen=True, slots=True)
class LayerState:
    """The storage of one layer: keys of 16 bits have no granularity; constants are the base64 of mu and lambda."""

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


def difference_lines(difference: ProfileDifference, terminal: Terminal) -> list[str]:
    """Facts, two strips above one another, and a table of the layers that changed."""
    lines = [*_facts(difference), "", *_strips(difference, terminal)]
    return [*lines, "", *_changed_layers(difference.layers)] if difference.layers else lines


def difference_page(difference: ProfileDifference, names: tuple[str, str]) -> str:
    """The page of two profiles, whose files have these names."""
    from kvtuner.report.html_page import render  # brings matplotlib, which not every look needs

    first, second = profile_layers(difference.first), profile_layers(difference.second)
    return render(
        "difference.html",
        title=f"{names[0]} beside {names[1]}",
        headline=_headline(difference),
        difference=difference,
        tables=_page_tables(difference, names),
        first=first,
        second=second,
        columns=list(zip(first, second, strict=False)),
        changed={change.layer: " and ".join(change.changed) for change in difference.layers or ()},
        pictures=_pictures(difference),
    )


def _headline(difference: ProfileDifference) -> str:
    if difference.first.digest == difference.second.digest:
        return "They store every layer alike: the digest is the same."
    parts = ["they are of models of other shapes"] if difference.geometry else []
    if difference.layers is not None:
        constants = sum(change.changed == CONSTANTS for change in difference.layers)
        parts.append(
            f"{len(difference.layers)} of {len(difference.first.layers)} layers changed"
            + (f", {constants} in constants only" if constants else "")
        )
    if difference.defaults:
        parts.append(f"all quantized layers have another {', '.join(difference.defaults)}")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _page_tables(difference: ProfileDifference, names: tuple[str, str]) -> dict[str, Table]:
    facts, first, second = difference.to_json(), difference.first, difference.second
    defaults = (difference.geometry | difference.defaults).items()
    sides = [
        ("file", *names),
        ("digest", *facts["digest"]),
        ("model", *facts["model"]),
        ("budget asked", first.budget.asked, second.budget.asked),
        *((name, str(before), str(after)) for name, (before, after) in defaults),
    ]
    sizes = [
        ("bytes per token", *map(count, facts["bytes_per_token"])),
        ("tokens per GiB", *map(count, facts["tokens_per_gib"])),
        ("tokens against bf16", *(f"{fixed(ratio)}x" for ratio in facts["ratio_to_bf16"])),
        ("bytes against the first", "1x", f"{fixed(facts['bytes_ratio'], 3)}x"),
        *((name, *(fixed(bits, 3) for bits in facts[name])) for name in ("mean_bits", "effective_bits")),
    ]
    layers = [
        (str(change.layer), str(change.first), str(change.second), ", ".join(change.changed))
        for change in difference.layers or ()
    ]
    columns = zip(_quality_column(first.quality), _quality_column(second.quality), strict=True)
    headers = ("", "first", "second")
    return {
        "facts": Table(headers, sides, wrap=True),
        "bytes": Table(headers, sizes),
        "layers": Table(("layer", "first", "second", "changed"), layers),
        "quality": Table(headers, [(name, *values) for name, values in zip(QUALITY, columns, strict=True)]),
    }


def _quality_column(record: QualityRecord | None) -> tuple[str, ...]:
    if record is None:
        return (NOT_MEASURED,) * len(QUALITY)
    return (
        interval(record.measured_kl),
        percent(record.top1_agreement),
        fixed(record.perplexity, 3),
        fixed(record.reference_perplexity, 3),
        record.read_plan,
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


def _facts(difference: ProfileDifference) -> list[str]:
    facts = difference.to_json()
    lines = [f"the same layers: {facts['digest'][0]}"] if facts["same_digest"] else []
    lines.append(_fact("model", *map(printable, facts["model"])))
    for name in FACTS:
        texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in facts[name]]
        lines.append(_fact(name, *texts))
    records = (difference.quality.first, difference.quality.second)
    lines.append(_fact("kl", *(interval(None if record is None else record.measured_kl) for record in records)))
    for name, (before, after) in (difference.geometry | difference.defaults).items():
        lines.append(_fact(name, str(before), str(after)))
    lines.append(f"{'bytes':<16}the second takes {facts['bytes_ratio']:.3f}x those of the first")
    lines.append(f"{'quality':<16}{difference.quality.text()}")
    return lines


def _fact(name: str, before: str, after: str) -> str:
    return f"{name:<16}{before:>24}  {after:>24}{'' if before == after else '  *'}"


def _strips(difference: ProfileDifference, terminal: Terminal) -> list[str]:
    first, second = profile_layers(difference.first), profile_layers(difference.second)
    one, other, explained = tracks(first, "1 "), tracks(second, "2 "), legend((*first, *second), terminal)
    if difference.layers is None:
        return [*strip_lines(one, terminal), "", *strip_lines(other, terminal), *explained]
    marks = [" "] * len(first)
    for change in difference.layers:
        marks[change.layer] = "~" if change.changed == CONSTANTS else "^"
    lines = strip_lines([*one, *other, Track("changed", "".join(marks))], terminal)
    return [*lines, *explained, *(indented("mark", MARKS, terminal) if difference.layers else [])]


def _changed_layers(changes: Sequence[LayerChange]) -> list[str]:
    rows = [(f"layer {change.layer}", str(change.first), str(change.second)) for change in changes]
    lines = Table(("", "", ""), rows, left=(0, 1, 2)).lines()
    notes = [" (other constants)" if change.changed == CONSTANTS else "" for change in changes]
    width = max(map(len, lines))
    return [f"{line:<{width}}{note}".rstrip() for line, note in zip(lines, notes, strict=True)]


def _pictures(difference: ProfileDifference) -> list[tuple[bytes, str]]:
    """One picture of what was measured alike, else one for each profile."""
    from kvtuner.report.plots.kl_by_bits import profile_picture, profile_points

    first = profile_points(difference.first, "first")
    second = profile_points(difference.second, "second", "second")
    groups = [first, second]
    if difference.quality.is_comparable:
        groups = [[*first, *(point for point in second if point not in first)]]
    titles = {"first": "first profile", "second": "second profile"}
    return [profile_picture(points, titles) for points in groups if points]
