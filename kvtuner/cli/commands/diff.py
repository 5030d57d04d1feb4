"""``kvtuner diff``: two profiles side by side, in the terminal and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner.cli.output_file import check_page_file, write_page
from kvtuner.pipeline.inputs import profile_of
from kvtuner.report.formatting import printable
from kvtuner.report.layer_codes import layer_codes
from kvtuner.report.layer_strip import Track, indented, legend, strip_lines, tracks
from kvtuner.report.profile_difference import CONSTANTS, difference_of
from kvtuner.report.profile_report import kl_text
from kvtuner.report.terminal import Terminal

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from kvtuner.exported_configs.sharing.find import ResolvedProfile
    from kvtuner.report.profile_difference import LayerChange, ProfileDifference

FACTS: Final = ("mean_bits", "effective_bits", "bytes_per_token", "tokens_per_gib", "ratio_to_bf16")
MARKS: Final = "^=other bits, transform or granularity  ~=other constants only"


def run(args: Namespace) -> int:
    """Run the sub-command; 1 with ``--exit-code`` if the layers differ."""
    found = [profile_of(args.first), profile_of(args.second)]
    first, second = (each.profile for each in found)
    difference = difference_of(first, second)
    if args.html:
        _write_page(Path(args.html), difference, _names(*found))
    if args.json:
        page = {"page": args.html} if args.html else {}
        print(json.dumps({**difference.to_json(), **page}, indent=1))
    else:
        print("\n".join(difference_lines(difference, Terminal.of_stdout())))
        if args.html:
            print(f"\npage: {args.html}")
    return int(bool(args.exit_code) and first.digest != second.digest)


def _names(first: ResolvedProfile, second: ResolvedProfile) -> tuple[str, str]:
    """What they are called, files with their folders where they are called alike."""
    if first.name != second.name:
        return first.name, second.name
    a, b = (f"{each.path.absolute().parent.name}/{each.path.name}" for each in (first, second))
    return a, b


def difference_lines(difference: ProfileDifference, terminal: Terminal) -> list[str]:
    """Facts, two strips above one another, and a table of the layers that changed."""
    lines = [*_facts(difference), "", *_strips(difference, terminal)]
    return [*lines, "", *_changed_layers(difference.layers)] if difference.layers else lines


def _changed_layers(changes: Sequence[LayerChange]) -> list[str]:
    rows = [(f"layer {each.layer}", str(each.first), str(each.second)) for each in changes]
    names, firsts, seconds = (max(map(len, column)) for column in zip(*rows, strict=True))
    notes = [" (other constants)" if each.what == CONSTANTS else "" for each in changes]
    return [
        f"{name:<{names}}  {first:<{firsts}}  {second:<{seconds}}{note}".rstrip()
        for (name, first, second), note in zip(rows, notes, strict=True)
    ]


def _write_page(path: Path, difference: ProfileDifference, names: tuple[str, str]) -> None:
    check_page_file(path)
    from kvtuner.report.difference_page import difference_page  # matplotlib is not for every look

    write_page(path, difference_page(difference, names))


def _facts(difference: ProfileDifference) -> list[str]:
    facts = difference.to_json()
    both = (difference.first, difference.second)
    lines = [f"the same layers: {facts['digest'][0]}"] if facts["same_digest"] else []
    lines.append(_row("model", *(printable(p.model.id) for p in both)))
    lines += [_row(name, *map(_text, facts[name])) for name in FACTS]
    lines.append(_row("kl", *(kl_text(p.quality) for p in both)))
    for name, (before, after) in (difference.geometry | difference.defaults).items():
        lines.append(_row(name, str(before), str(after)))
    lines.append(f"{'bytes':<16}the second takes {facts['bytes_ratio']:.3f}x those of the first")
    lines.append(f"{'quality':<16}{difference.quality.words()}")
    return lines


def _row(name: str, before: str, after: str) -> str:
    return f"{name:<16}{before:>24}  {after:>24}{'' if before == after else '  *'}"


def _strips(difference: ProfileDifference, terminal: Terminal) -> list[str]:
    first, second = layer_codes(difference.first), layer_codes(difference.second)
    explained = legend((*first, *second), terminal)
    if difference.layers is None:
        return [
            *strip_lines(tracks(first, "1 "), terminal),
            "",
            *strip_lines(tracks(second, "2 "), terminal),
            *explained,
        ]
    marks = [" "] * len(first)
    for change in difference.layers:
        marks[change.layer] = "~" if change.what == CONSTANTS else "^"
    rows = [*tracks(first, "1 "), *tracks(second, "2 "), Track("changed", "".join(marks))]
    return [*strip_lines(rows, terminal), *explained, *(indented("mark", MARKS, terminal) if difference.layers else [])]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
