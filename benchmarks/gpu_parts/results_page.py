"""Writes the results as JSON and as Markdown tables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
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
    machine, copied = results["machine"], results["copy_bytes_per_s"]
    yield f"# Kernels on {machine['device']}\n"
    if machine["device"] == "smoke":
        yield "**A smoke test on a processor, in Triton's interpreter: no time here means anything.**\n"
    yield f"`{results['command']}` at {results['time']}, {results['seconds']:.0f} s in all."
    yield ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None) + "."
    if results["sglang_missing"]:
        yield f"SGLang's own kernel is not in this comparison: {results['sglang_missing']}."
    if results["left_out"]:
        yield f"**Left out: {'; '.join(results['left_out'])}.**"
    yield ""
    yield from _correct(results["correct"])
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


def _correct(rows: list[Row]) -> Iterator[str]:
    passed = sum(bool(row["passed"]) for row in rows)
    yield f"## Correct: {f'{passed} of {len(rows)} cases' if rows else '**not checked**'}\n"
    failed = [row for row in rows if row["passed"] is False]
    if failed:
        yield "**A kernel is wrong: no time below means anything.**\n"
    for row in failed:
        yield f"- **{row['case']}: {row.get('why', '')} error {row['error']:.3g}, limit {row['limit']:g}**"
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row["case"].split()[0], []).append(row["error"])
    for operation, listed in errors.items():
        yield f"- {operation}: {len(listed)} cases, largest error {max(listed):.3g}"
    yield ""


def _section(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A title and a table; nothing without rows."""
    table = [headers, ["---"] * len(headers), *rows]
    cells = ["| " + " | ".join(map(str, row)) + " |" for row in table]
    return [f"\n## {title}\n", cells[0], cells[1].replace(" ", ""), *cells[2:]] if rows else []


def _decode(rows: list[Row], copied: float) -> list[str]:
    columns = list(dict.fromkeys((row["pair"], row["kernel"], row["kind"]) for row in rows if row["pair"] != "K16V16"))
    heads = [pair + ("" if kernel == "ours" else f", {kernel}") + ("" if kind == "none" else f", {kind}")
             for pair, kernel, kind in columns]  # fmt: skip
    by_load: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        by_load.setdefault((row["shape"], row["batch"], row["length"]), []).append(row)
    cells = [[*load, *row] for load, listed in by_load.items() if (row := _decode_row(load, listed, columns, copied))]
    title = (
        "Decode: one layer, random slots, page size 1, rows from memory\n\n"
        "Times as fast as the fastest bf16 of the same batch, in brackets TB/s and the share of the copy's."
    )
    return _section(title, ["shape", "batch", "length", "fastest bf16", *heads, "did not run"], cells)


def _decode_row(
    load: tuple[str, int, int], rows: list[Row], columns: list[tuple[str, str, str]], copied: float
) -> list[str]:
    """The cells of one load; none where no bf16 kernel ran."""
    best = fastest(row for row in rows if row["pair"] == "K16V16")
    if best is None:
        return []
    cells = [f"{best['seconds'] * 1e6:.1f} us, {best['kernel']} ({_rate(best, copied)})"]
    for column in columns:
        row = fastest(row for row in rows if (row["pair"], row["kernel"], row["kind"]) == column)
        floor = FLOOR if load[2] <= SHORT else None
        wanted = GOALS.get(load, {}).get(column[0], floor) if column[1] == "ours" else None
        cells.append(f"{goal(best['seconds'] / row['seconds'], wanted)} ({_rate(row, copied)})" if row else "-")
    return [*cells, ", ".join(f"{row['kernel']} ({row['why']})" for row in rows if not row["seconds"])]


def _model(rows: list[Row]) -> list[str]:
    columns = ("what", "kind", "kernel", "batch", "length", "bytes_per_token")
    cells = []
    for row in rows:
        best = fastest(other for other in rows if (other["what"], other["kind"]) == (row["what"], "bf16"))
        speed, ratio = row.get("why", "-"), "-"
        if row["seconds"] and best is not None:
            wanted = MODEL_GOALS[row["what"]] if row["kind"] == "K4V4" else None
            speed, ratio = f"{row['tokens_per_s']:,.0f}", goal(row["tokens_per_s"] / best["tokens_per_s"], wanted)
        cells.append([*(row[column] for column in columns), speed, ratio])
    return _section("A decoding step of all layers", [*columns, "tokens per second", "of the fastest bf16"], cells)


def _stores(rows: list[Row]) -> list[str]:
    cells = []
    for row in rows:
        best = fastest(other for other in rows if (other["tokens"], other["pair"]) == (row["tokens"], "K16V16"))
        limit = None if row["pair"] == "K16V16" else STORE_GOAL
        ratio = goal(row["seconds"] / best["seconds"], limit, at_most=True) if best and row["seconds"] else "-"
        cells.append([row["tokens"], row["pair"], row["kind"], row["kernel"], _us(row), ratio])
    headers = ["tokens", "pair", "kind", "kernel", "us", "of the fastest bf16 store"]
    return _section("Store, keys and values in one launch", headers, cells)


def _pages(rows: list[Row]) -> list[str]:
    cells = []
    for row in rows:
        wide = next((other for other in rows if other["pair"] == row["pair"] and other["page_size"] == 16), row)
        share = f"{wide['seconds'] / row['seconds']:.2f}x"
        cells.append([row["pair"], row["batch"], row["length"], row["page_size"], _us(row), share])
    headers = ["pair", "batch", "length", "page size", "us", "speed of page size 16"]
    return _section("Pages anywhere in the pool", headers, cells)


def _plain(title: str, rows: list[Row], columns: tuple[str, ...], copied: float) -> list[str]:
    cells = []
    for row in rows:
        rate = f" ({_rate(row, copied)})" if "bytes" in row and row["seconds"] else ""
        cells.append([*(_cell(row[column]) for column in columns), f"{_us(row)}{rate}"])
    return _section(title, [*columns, "us"], cells)


def _rate(row: Row, copied: float) -> str:
    rate = row["bytes"] / row["seconds"]
    return f"{rate / 1e12:.2f} TB/s, {rate / copied:.0%}"


def _us(row: Row) -> str:
    return f"{row['seconds'] * 1e6:.1f}" if row["seconds"] else str(row.get("why", "-"))


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(str(value[name]) for name in ("tokens", "warps", "stages"))
    return "-" if value is None else str(value)
