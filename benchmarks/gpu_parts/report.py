"""The results in words and tables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

Row = dict[str, Any]

GOALS: Final = {
    ("Llama-3.1-8B", 32, 16384): {"K4V4": 2.5, "K8V8": 1.7, "K4V2": 3.0, "K2V2": 3.3},
    ("Llama-3.1-8B", 1, 131072): {"K4V4": 2.0},
}
"""Of an H200: times as fast as the fastest bf16."""


def save(folder: Path, results: dict[str, Any]) -> None:
    """Write results.json and results.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "results.md").write_text("\n".join(lines(results)) + "\n")


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The Markdown."""
    machine = results["machine"]
    yield f"# Kernels on {machine['device']}"
    yield ""
    if machine["device"] == "smoke":
        yield "**A smoke test on a processor, in Triton's interpreter: no time here means anything.**"
        yield ""
    yield f"`{results['command']}` at {results['time']}, {results['seconds']:.0f} s in all."
    yield ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None) + "."
    if results["sglang_missing"]:
        yield f"SGLang's own kernel is not in this comparison: {results['sglang_missing']}."
    if results["left_out"]:
        yield f"**Left out, for want of time: {', '.join(results['left_out'])}.**"
    yield ""
    failed = [row for row in results["correct"] if not row["passed"]]
    yield f"## Correct: {len(results['correct']) - len(failed)} of {len(results['correct'])} cases"
    yield ""
    yield from (f"- **{row['case']}: error {row['error']:.3g}, limit {row['limit']:g}**" for row in failed)
    for what in dict.fromkeys(row["case"].split()[0] for row in results["correct"]):
        listed = [row for row in results["correct"] if row["case"].split()[0] == what]
        yield f"- {what}: {len(listed)} cases, largest error {max(row['error'] for row in listed):.3g}"
    yield ""
    copied = results["copy_bytes_per_s"]
    yield f"A large copy moves {copied / 1e12:.2f} TB/s, read and written."
    yield from _decode(results["decode"], copied)
    yield from _plain("Pages of a random pool", results["pages"], ("pair", "page_size"), "seconds")
    yield from _plain("Store", results["stores"], ("tokens", "pair", "kind", "kernel"), "seconds")
    yield from _plain("Extend", results["extends"], ("pair", "prefix", "tokens", "way"), "seconds")
    yield from _plain(
        "A decoding step of all layers", results["model"], ("what", "pair", "kernel", "batch", "length"),
        "tokens_per_s", "tokens per second",
    )  # fmt: skip
    yield from _plain("Launch settings", results["sweep"], ("pair", "batch", "length", "launch", "splits"), "seconds")


def fastest_bf16(rows: Iterable[Row]) -> Row:
    """Of one shape, batch and length."""
    return min((row for row in rows if row["pair"] == "K16V16" and row["seconds"]), key=lambda row: row["seconds"])


def _decode(rows: list[Row], copied: float) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield "## Decode: one layer, random slots, page size 1, rows from memory"
    yield ""
    yield "Times as fast as the fastest bf16 of the same batch, in brackets the share of the copy's bytes per second."
    yield ""
    pairs = list(dict.fromkeys(row["pair"] for row in rows if row["pair"] != "K16V16"))
    yield "| shape | batch | length | fastest bf16 | " + " | ".join(pairs) + " | dequantize, then dot (K4V4) | goals |"
    yield "|---" * (len(pairs) + 6) + "|"
    for key in dict.fromkeys((row["shape"], row["batch"], row["length"]) for row in rows):
        of_place = [row for row in rows if (row["shape"], row["batch"], row["length"]) == key]
        best = fastest_bf16(of_place)
        cells = [f"{best['seconds'] * 1e6:.1f} us, {best['kernel']} ({_share(best, copied)})"]
        for kernel, names in (("ours", pairs), ("dequantize then dot", ["K4V4"])):
            for pair in names:
                row = next((row for row in of_place if (row["pair"], row["kernel"]) == (pair, kernel)), None)
                cells.append("-" if row is None else f"{best['seconds'] / row['seconds']:.2f}x ({_share(row, copied)})")
        goals = ", ".join(f"{pair} {goal}x" for pair, goal in GOALS.get(key, {}).items())
        yield f"| {key[0]} | {key[1]} | {key[2]} | " + " | ".join(cells) + f" | {goals} |"


def _share(row: Row, copied: float) -> str:
    return f"{row['bytes'] / row['seconds'] / copied:.0%}"


def _plain(title: str, rows: list[Row], columns: tuple[str, ...], value: str, unit: str = "us") -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield f"## {title}"
    yield ""
    yield "| " + " | ".join(columns) + f" | {unit} |"
    yield "|---" * (len(columns) + 1) + "|"
    for row in rows:
        number = row[value]
        shown = row.get("why", "-") if number is None else f"{number * 1e6:.1f}" if unit == "us" else f"{number:,.0f}"
        yield "| " + " | ".join(_cell(row[column]) for column in columns) + f" | {shown} |"


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(str(value[name]) for name in ("tokens", "warps", "stages"))
    return "-" if value is None else str(value)
