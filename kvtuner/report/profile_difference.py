"""Two profiles and what differs: as facts, as text for a terminal and as a page. Knows nothing of files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import to_jsonable_python

from kvtuner.geometry import ModelGeometry
from kvtuner.precision import tokens_per_gib
from kvtuner.report.formatting import NOT_MEASURED, count, fixed, interval, percent, printable
from kvtuner.report.layer_difference import CONSTANTS, LayerChange, compare_layers
from kvtuner.report.layer_strip import indented, legend, profile_layers, strip_lines, tracks
from kvtuner.report.profile_report import geometry_facts, ratio_to_bf16
from kvtuner.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtuner.exported_configs.profile.layer_storage import SideDefaults
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import QualityRecord
    from kvtuner.report.layer_strip import Terminal
    from kvtuner.report.plots.drawing import Drawn

FIGURES: Final = ("mean_bits", "effective_bits", "bytes_per_token", "tokens_per_gib", "ratio_to_bf16")
QUALITY: Final[dict[str, Callable[[QualityRecord], str]]] = {
    "KL [95%]": lambda quality: interval(quality.measured_kl),
    "top-1 as the unquantized model": lambda quality: percent(quality.top1_agreement),
    "perplexity": lambda quality: fixed(quality.perplexity, 3),
    "unquantized": lambda quality: fixed(quality.reference_perplexity, 3),
    "read plan": lambda quality: quality.read_plan,
}
MARKS: Final = "^=other bits, group, transform or granularity  ~=other constants only"


@dataclass(frozen=True, slots=True)
class ProfileDifference:
    """Two profiles and everything in which they differ that a server or a user would notice.

    Attributes:
        geometry: The counts of the models that differ, with both values, or the layers of each kind and shape.
        defaults: The settings of all layers that differ, such as ``k.group_size``, with both values.
        layers: The layers that changed; None where the models have not the same layers with a cache.
        apart: The circumstances that the measurements of quality do not share, or may not; empty where the tokens are
            the same.
        intervals_overlap: Whether the intervals of KL overlap; None where one was not measured.
    """

    first: Profile
    second: Profile
    geometry: dict[str, tuple[Any, Any]]
    defaults: dict[str, tuple[Any, Any]]
    layers: tuple[LayerChange, ...] | None
    apart: tuple[str, ...]
    intervals_overlap: bool | None

    @property
    def has_comparable_quality(self) -> bool:
        """Whether the quality of both was measured, and alike."""
        return self.intervals_overlap is not None and not self.apart

    def quality_text(self) -> str:
        """The sentence that compares the two measurements."""
        first, second = self.first.quality, self.second.quality
        if first is None or second is None:
            missing = [name for name, record in (("first", first), ("second", second)) if record is None]
            return f"not measured of the {' and the '.join(missing)}: nothing to compare"
        overlap = "the intervals overlap" if self.intervals_overlap else "the intervals do not overlap"
        if self.apart:
            return f"not comparable, since these differ or are not known: {', '.join(self.apart)} ({overlap})"
        if self.intervals_overlap:
            return f"measured on the same tokens; {overlap}, which shows neither to be better"
        better = "first" if first.measured_kl.mean < second.measured_kl.mean else "second"
        return f"measured on the same tokens; {overlap}: the {better} is better"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; pairs hold the first profile's and the second's."""
        both = (self.first, self.second)
        kls = [None if p.quality is None else p.quality.measured_kl for p in both]
        payload: dict[str, Any] = {
            "same_digest": self.first.digest == self.second.digest,
            "digest": [p.digest for p in both],
            "model": [p.model.id for p in both],
            "geometry": self.geometry,
            "k_granularity": [p.defaults.k.granularity for p in both],
            "defaults_differ": bool(self.defaults),
            "defaults": self.defaults,
            "layers_compared": self.layers is not None,
            "layers": self.layers or (),
            "mean_bits": [float(p.mean_bits) for p in both],
            "effective_bits": [round(float(p.effective_bits), 6) for p in both],
            "bytes_per_token": [p.bytes_per_token() for p in both],
            "tokens_per_gib": [tokens_per_gib(p.bytes_per_token() + p.index_bytes) for p in both],
            "ratio_to_bf16": [round(ratio_to_bf16(p), 4) for p in both],
            "bytes_ratio": round(self.second.bytes_per_token() / self.first.bytes_per_token(), 6),
            "kl": [None if kl is None else kl.mean for kl in kls],
            "quality": {
                "measured_kl": kls,
                "comparable": self.has_comparable_quality,
                "apart": self.apart,
                "intervals_overlap": self.intervals_overlap,
            },
        }
        return to_jsonable_python(payload)  # type: ignore[no-any-return]


def difference_of(first: Profile, second: Profile) -> ProfileDifference:
    """Compare two profiles; constants are compared where heads and channels are the same."""
    counts, others = _counts(first), _counts(second)
    geometry = {name: (value, others[name]) for name, value in counts.items() if value != others[name]}
    # Transforms are compared layer by layer.
    before, after = _settings(first), _settings(second)
    defaults = {name: (value, after[name]) for name, value in before.items() if value != after[name]}
    has_same_layers = [entry.layer for entry in first.layers] == [entry.layer for entry in second.layers]
    layers = compare_layers(first, second, with_constants=not geometry) if has_same_layers else None
    overlap = None
    if first.quality is not None and second.quality is not None:
        a, b = first.quality.measured_kl, second.quality.measured_kl
        overlap = a.low <= b.high and b.low <= a.high
    return ProfileDifference(first, second, geometry, defaults, layers, _apart(first, second), overlap)


def _counts(profile: Profile) -> dict[str, Any]:
    """The counts of a model, and the layers of each kind and shape where they differ."""
    kinds = "; ".join(f"{kind}, {layers}" for kind, layers in geometry_facts(profile)) or "full, all layers alike"
    return {
        name: getattr(profile.geometry, name) for name in ModelGeometry.__dataclass_fields__ if name != "layer_ids"
    } | {"kinds": kinds}


def _settings(profile: Profile) -> dict[str, Any]:
    sides: tuple[tuple[str, SideDefaults], ...] = (("k", profile.defaults.k), ("v", profile.defaults.v))
    settings = {
        f"{side}.{name}": value
        for side, shared in sides
        for name, value in (
            ("granularity", shared.granularity),
            ("group_size", shared.group_size),
            ("symmetric", shared.symmetric),
            ("fit", shared.grid_fit),
            ("word_bits", shared.grid_word_bits),
        )
    }
    return {**settings, "residual_length": profile.window.residual_length, "sinks": profile.window.sinks}


def _apart(first: Profile, second: Profile) -> tuple[str, ...]:
    same_weights = first.model.checkpoint_sha256 == second.model.checkpoint_sha256 is not None
    circumstances, others = (_circumstances(profile, same_weights=same_weights) for profile in (first, second))
    if not (circumstances and others):
        return ()
    return tuple(name for name, value in circumstances.items() if value is None or value != others[name])


def _circumstances(profile: Profile, *, same_weights: bool) -> dict[str, Any]:
    """The facts that two measurements of the same tokens, read alike by the same model, share; None is not known.

    Where the weights are known to be the same, it makes no difference what the model is called. Nothing was measured
    where there are no facts.
    """
    model, quality, record = profile.model, profile.quality, profile.provenance.calibration
    if quality is None:
        return {}
    names = {"id", "revision"} if same_weights else set()
    return {
        "model": (model.model_dump(exclude={"dtype", "max_positions", *names}), profile.geometry),
        "dtype": model.dtype,
        "read plan": quality.read_plan,
        "report text": None if record is None else (record.token_ids_sha256.report, quality.split_tokens),
        "positions": None if record is None else record.position_range,
    }


def difference_lines(difference: ProfileDifference, terminal: Terminal, names: tuple[str, str]) -> list[str]:
    """Facts, two strips above one another, and a table of the layers that changed; the files have these names."""
    lines = [*_fact_lines(difference, terminal, names), "", *_strips(difference, terminal)]
    return [*lines, "", *_changed_layers(difference.layers, terminal)] if difference.layers else lines


def _fact_lines(difference: ProfileDifference, terminal: Terminal, names: tuple[str, str]) -> list[str]:
    one, other = map(printable, names)
    facts = difference.to_json()
    rows = [("model", *map(printable, facts["model"]))]
    rows += [(name, *(f"{x:.4g}" if isinstance(x, float) else str(x) for x in facts[name])) for name in FIGURES]
    qualities = (difference.first.quality, difference.second.quality)
    rows.append(("kl", *(interval(None if quality is None else quality.measured_kl) for quality in qualities)))
    rows += [(name, *map(str, values)) for name, values in (difference.geometry | difference.defaults).items()]
    size = max(len(row[0]) for row in rows)
    sentences = [
        ("files".ljust(size), f"1, the first, is {one}; 2, the second, is {other}"),
        ("bytes", _bytes_text(difference, one, other)),
        ("quality", difference.quality_text()),
    ]
    return [
        *([f"the same layers: {difference.first.digest}"] if facts["same_digest"] else []),
        *Table([""] * 4, [(*row, "" if row[1] == row[2] else "*") for row in rows], left=(0, 3)).lines(terminal.width),
        *Table.of_facts(sentences).lines(terminal.width),
    ]


def _bytes_text(difference: ProfileDifference, one: str, other: str) -> str:
    first, second = difference.first.bytes_per_token(), difference.second.bytes_per_token()
    return "the same of both" if first == second else f"{other} takes {second / first:.3f}x those of {one}"


def _strips(difference: ProfileDifference, terminal: Terminal) -> list[str]:
    first, second = profile_layers(difference.first), profile_layers(difference.second)
    one, other, explained = tracks(first, "1 "), tracks(second, "2 "), legend((first, second), terminal)
    if difference.layers is None:
        return [*strip_lines(one, terminal), "", *strip_lines(other, terminal), *explained]
    marks = [" "] * len(next(iter(one.values())))
    for change in difference.layers:
        marks[change.layer] = "~" if change.changed == CONSTANTS else "^"
    lines = strip_lines({**one, **other, "changed": "".join(marks)}, terminal)
    return [*lines, *explained, *(indented("mark", MARKS, terminal) if difference.layers else [])]


def _changed_layers(changes: Sequence[LayerChange], terminal: Terminal) -> list[str]:
    rows = [
        (
            *(f"layer {change.layer}", str(change.first), str(change.second)),
            "(other constants)" if change.changed == CONSTANTS else "",
        )
        for change in changes
    ]
    return Table([""] * 4, rows, left=(0, 1, 2, 3)).lines(terminal.width)


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
        only = f", {constants} in constants only" if constants else ""
        parts.append(f"{len(difference.layers)} of {len(difference.first.layers)} layers changed{only}")
    if difference.defaults:
        parts.append(f"all quantized layers have another {', '.join(difference.defaults)}")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _page_tables(difference: ProfileDifference, names: tuple[str, str]) -> dict[str, Table]:
    facts, both = difference.to_json(), (difference.first, difference.second)
    sides = [
        ("file", *names),
        ("digest", *facts["digest"]),
        ("model", *facts["model"]),
        ("budget asked", *(profile.budget.asked for profile in both)),
        *((name, *map(str, values)) for name, values in (difference.geometry | difference.defaults).items()),
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
    quality = [
        (name, *(NOT_MEASURED if profile.quality is None else text(profile.quality) for profile in both))
        for name, text in QUALITY.items()
    ]
    headers = ("", "first", "second")
    return {
        "facts": Table(headers, sides, wrap=True),
        "bytes": Table(headers, sizes),
        "layers": Table(("layer", "first", "second", "changed"), layers),
        "quality": Table(headers, quality),
    }


def _pictures(difference: ProfileDifference) -> list[Drawn]:
    """One drawing of what was measured alike, else one for each profile."""
    from kvtuner.report.plots.drawing import drawn
    from kvtuner.report.plots.kl_by_bits import KlPicture, kl_by_bits, profile_points

    first = profile_points(difference.first, "first")
    second = profile_points(difference.second, "second", "second")
    groups = [first, second]
    if difference.has_comparable_quality:
        groups = [[*first, *(point for point in second if point not in first)]]
    titles = {"first": "first profile", "second": "second profile"}
    return [drawn(partial(kl_by_bits, KlPicture(points, titles))) for points in groups if points]
