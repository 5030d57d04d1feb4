"""Writes the results as JSON and as Markdown tables."""

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
"""The goals of an H200: times as fast as the fastest bf16."""
SHORT: Final = 2048
"""The tokens up to which a context is short."""
FLOOR: Final = 0.95
"""The least speed of a pair in a short context, as a share of bf16's."""
MODEL_GOALS: Final = {"equal batch": 1.7, "full pool": 2.2}
"""The goals of K4V4, times as fast as bf16."""
STORE_GOAL: Final = 1.2
"""The longest time of a store, times that of a bf16 store."""


def save(folder: Path, results: dict[str, Any]) -> None:
    """Write results.json and results.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "results.md").write_text("\n".join(lines(results)) + "\n")


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The lines of the Markdown page."""
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
        yield f"**Left out: {'; '.join(results['left_out'])}.**"
    yield ""
    failed = [row for row in results["correct"] if row["passed"] is False]
    passed = sum(bool(row["passed"]) for row in results["correct"])
    if not results["correct"]:
        yield "## Correct: **not checked**"
    else:
        yield f"## Correct: {passed} of {len(results['correct'])} cases"
    yield ""
    if failed:
        yield "**A kernel is wrong: no time below means anything.**"
        yield ""
    for row in failed:
        yield f"- **{row['case']}: {row.get('why', '')} error {row['error']:.3g}, limit {row['limit']:g}**"
    for what in dict.fromkeys(row["case"].split()[0] for row in results["correct"]):
        listed = [row for row in results["correct"] if row["case"].split()[0] == what]
        yield f"- {what}: {len(listed)} cases, largest error {max(row['error'] for row in listed):.3g}"
    yield ""
    copied = results["copy_bytes_per_s"]
    yield f"A large copy moves {copied / 1e12:.2f} TB/s, read and written."
    yield from _decode(results["decode"], copied)
    yield from _model(results["model"])
    yield from _stores(results["stores"])
    yield from _pages(results["pages"])
    yield from _plain("Extend", results["extends"], ("pair", "prefix", "tokens", "way"), copied)
    yield from _plain("Launch settings", results["sweep"], ("pair", "batch", "length", "launch", "splits"), copied)


def fastest(rows: Iterable[Row]) -> Row | None:
    """The fastest row of those that ran; None without one."""
    return min((row for row in rows if row["seconds"]), key=lambda row: row["seconds"], default=None)


def goal(value: float, limit: float | None, *, at_most: bool = False) -> str:
    """A ratio, and whether it meets its goal."""
    if limit is None:
        return f"{value:.2f}x"
    met = value <= limit if at_most else value >= limit
    return f"{value:.2f}x, {'met' if met else '**missed**'}: {limit}x"


def _decode(rows: list[Row], copied: float) -> Iterator[str]:
    if not rows:
        return
    yield from _title("Decode: one layer, random slots, page size 1, rows from memory")
    yield "Times as fast as the fastest bf16 of the same batch, in brackets TB/s and the share of the copy's."
    yield ""
    columns = list(dict.fromkeys((row["pair"], row["kernel"], row["kind"]) for row in rows if row["pair"] != "K16V16"))
    heads = [pair + ("" if kernel == "ours" else f", {kernel}") + ("" if kind == "none" else f", {kind}")
             for pair, kernel, kind in columns]  # fmt: skip
    yield from _head(["shape", "batch", "length", "fastest bf16", *heads, "did not run"])
    for key in dict.fromkeys((row["shape"], row["batch"], row["length"]) for row in rows):
        of_load = [row for row in rows if (row["shape"], row["batch"], row["length"]) == key]
        best = fastest(row for row in of_load if row["pair"] == "K16V16")
        if best is None:
            continue
        cells = [f"{best['seconds'] * 1e6:.1f} us, {best['kernel']} ({_rate(best, copied)})"]
        for column in columns:
            row = fastest(row for row in of_load if (row["pair"], row["kernel"], row["kind"]) == column)
            floor = FLOOR if key[2] <= SHORT else None
            wanted = GOALS.get(key, {}).get(column[0], floor) if column[1] == "ours" else None
            ratio = "-" if row is None else goal(best["seconds"] / row["seconds"], wanted)
            cells.append(ratio if row is None else f"{ratio} ({_rate(row, copied)})")
        missing = ", ".join(f"{row['kernel']} ({row['why']})" for row in of_load if not row["seconds"])
        yield f"| {key[0]} | {key[1]} | {key[2]} | " + " | ".join(cells) + f" | {missing} |"


def _model(rows: list[Row]) -> Iterator[str]:
    if not rows:
        return
    yield from _title("A decoding step of all layers")
    columns = ("what", "kind", "kernel", "batch", "length", "bytes_per_token")
    yield from _head([*columns, "tokens per second", "of the fastest bf16"])
    for row in rows:
        best = fastest(each for each in rows if (each["what"], each["kind"]) == (row["what"], "bf16"))
        shown = [str(row[column]) for column in columns]
        if not row["seconds"] or best is None:
            yield "| " + " | ".join([*shown, row.get("why", "-"), "-"]) + " |"
            continue
        wanted = MODEL_GOALS[row["what"]] if row["kind"] == "K4V4" else None
        ratio = goal(row["tokens_per_s"] / best["tokens_per_s"], wanted)
        yield "| " + " | ".join([*shown, f"{row['tokens_per_s']:,.0f}", ratio]) + " |"


def _stores(rows: list[Row]) -> Iterator[str]:
    if not rows:
        return
    yield from _title("Store, keys and values in one launch")
    yield from _head(["tokens", "pair", "kind", "kernel", "us", "of the fastest bf16 store"])
    for row in rows:
        best = fastest(each for each in rows if (each["tokens"], each["pair"]) == (row["tokens"], "K16V16"))
        ratio = "-" if best is None or not row["seconds"] else goal(
            row["seconds"] / best["seconds"], None if row["pair"] == "K16V16" else STORE_GOAL, at_most=True
        )  # fmt: skip
        yield f"| {row['tokens']} | {row['pair']} | {row['kind']} | {row['kernel']} | {_us(row)} | {ratio} |"


def _pages(rows: list[Row]) -> Iterator[str]:
    if not rows:
        return
    yield from _title("Pages anywhere in the pool")
    yield from _head(["pair", "batch", "length", "page size", "us", "speed of page size 16"])
    for row in rows:
        wide = next((each for each in rows if each["pair"] == row["pair"] and each["page_size"] == 16), row)
        share = f"{wide['seconds'] / row['seconds']:.2f}x"
        yield f"| {row['pair']} | {row['batch']} | {row['length']} | {row['page_size']} | {_us(row)} | {share} |"


def _plain(title: str, rows: list[Row], columns: tuple[str, ...], copied: float) -> Iterator[str]:
    if not rows:
        return
    yield from _title(title)
    yield from _head([*columns, "us"])
    for row in rows:
        rate = f" ({_rate(row, copied)})" if "bytes" in row and row["seconds"] else ""
        yield "| " + " | ".join(_cell(row[column]) for column in columns) + f" | {_us(row)}{rate} |"


def _title(title: str) -> Iterator[str]:
    yield from ("", f"## {title}", "")


def _head(columns: list[str]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|---" * len(columns) + "|"


def _rate(row: Row, copied: float) -> str:
    rate = row["bytes"] / row["seconds"]
    return f"{rate / 1e12:.2f} TB/s, {rate / copied:.0%}"


def _us(row: Row) -> str:
    return f"{row['seconds'] * 1e6:.1f}" if row["seconds"] else str(row.get("why", "-"))


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(str(value[name]) for name in ("tokens", "warps", "stages"))
    return "-" if value is None else str(value)
