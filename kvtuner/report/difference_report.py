"""Two profiles side by side, as text for a terminal and as a page. Knows nothing of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtuner.report.formatting import NOT_MEASURED, count, fixed, interval, percent, printable
from kvtuner.report.layer_strip import Track, indented, legend, profile_layers, strip_lines, tracks
from kvtuner.report.profile_difference import CONSTANTS
from kvtuner.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.records import QualityRecord
    from kvtuner.report.layer_strip import Terminal
    from kvtuner.report.profile_difference import LayerChange, ProfileDifference

FACTS: Final = ("mean_bits", "effective_bits", "bytes_per_token", "tokens_per_gib", "ratio_to_bf16")
MARKS: Final = "^=other bits, transform or granularity  ~=other constants only"
QUALITY: Final = ("KL [95%]", "top-1 as the unquantized model", "perplexity", "unquantized", "read plan")


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
    # Turned from columns of profiles into rows of figures.
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
