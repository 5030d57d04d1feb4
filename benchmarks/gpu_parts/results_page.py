"""Writes the results as JSON and as Markdown tables."""

from __future__ import annotations

import json
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvtuner.report.formatting import NOT_MEASURED
from kvtuner.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

Row = dict[str, Any]
Figure: TypeAlias = "Callable[[Row], str]"
"""A row's figure, as text."""

GOALS: Final = {
    ("Llama-3.1-8B", 32, 16384): {"K4V4": 2.5, "K8V8": 1.7, "K4V2": 3.0, "K2V2": 3.3},
    ("Llama-3.1-8B", 1, 131072): {"K4V4": 2.0},
}
"""The goals of an H200: times as fast as the fastest bf16."""
PREFILL_COLUMNS: Final = ("shape", "batch", "prefix", "tokens", "pair", "kind", "kernel")
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
    yield from _server(results["server"])
    yield f"A large copy moves {copied / 1e12:.2f} TB/s, read and written."
    yield from _decode(results["decode"], copied)
    model, stores, pages = results["model"], results["stores"], results["pages"]
    timed: dict[str, Figure] = {"us": partial(_time, copied)}
    columns = ("what", "kind", "kernel", "batch", "length", "bytes_per_token")
    speeds: dict[str, Figure] = {
        "tokens per second": _tokens_per_s,
        "of the fastest bf16": partial(_of_bf16_step, model),
    }
    yield from _section("A decoding step of all layers", model, columns, speeds)
    ratio = {"of the fastest bf16 store": partial(_of_bf16_store, stores)}
    title = "Store, keys and values in one launch"
    yield from _section(title, stores, ("tokens", "pair", "kind", "kernel"), timed | ratio)
    share = {"speed of page size 16": partial(_of_wide_pages, pages)}
    yield from _section("Pages anywhere in the pool", pages, ("pair", "batch", "length", "page_size"), timed | share)
    prefills = results["prefill"]
    against = {"of the fastest bf16": partial(_of_bf16_prefill, prefills)}
    yield from _section("Prefill: one layer", prefills, PREFILL_COLUMNS, timed | against)
    yield from _section("Extend", results["extends"], ("pair", "prefix", "tokens", "way"), timed)
    yield from _section("Launch settings", results["sweep"], ("pair", "batch", "length", "launch", "splits"), timed)


def fastest(rows: Iterable[Row]) -> Row | None:
    """The fastest row of those that ran; None without one."""
    return min((row for row in rows if row["seconds"]), key=lambda row: row["seconds"], default=None)


def goal(value: float, limit: float | None, *, at_most: bool = False) -> str:
    """A ratio, and whether it meets its goal."""
    if limit is None:
        return f"{value:.2f}x"
    met = value <= limit if at_most else value >= limit
    return f"{value:.2f}x, {'met' if met else 'MISSED'}: {limit}x"


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
        if row["passed"] is not None:
            errors.setdefault(row["case"].split()[0], []).append(row["error"])
    for operation, listed in errors.items():
        yield f"- {operation}: {len(listed)} cases, largest error {max(listed):.3g}"
    for row in rows:
        if row["passed"] is None:
            yield f"- not checked: {row['case']}, {row['why']}"
    yield ""


def _server(rows: list[Row]) -> Iterator[str]:
    """A line for everything that was checked of servers."""
    if not rows:
        return
    passed = sum(bool(row["passed"]) for row in rows)
    yield f"## Servers beside transformers: {passed} of {len(rows)} checks\n"
    for row in rows:
        outcome = {True: "right", False: "**WRONG**", None: "not checked"}[row["passed"]]
        kl = f", KL {row['error']:.2g}, limit {row['limit']:.2g}" if row["limit"] else ""
        yield f"- {row['case']}: {outcome}{kl}{', ' + row['why'] if row.get('why') else ''}"
    yield ""


def _section(title: str, rows: list[Row], columns: tuple[str, ...], figures: Mapping[str, Figure]) -> list[str]:
    """A title and a table of fields and of figures, a line for each row; nothing without rows."""
    cells = [[*(_cell(row[name]) for name in columns), *(text(row) for text in figures.values())] for row in rows]
    return [f"\n## {title}\n", *Table([*columns, *figures], cells).markdown()] if rows else []


def _decode(rows: list[Row], copied: float) -> list[str]:
    """A line for each load, a column for each kernel over packed rows."""
    columns = list(dict.fromkeys((row["pair"], row["kernel"], row["kind"]) for row in rows if row["pair"] != "K16V16"))
    heads = [", ".join(part for part in column if part not in ("ours", "none")) for column in columns]
    cells = []
    for load, group in groupby(rows, key=lambda row: (row["shape"], row["batch"], row["length"])):
        listed = list(group)
        best = fastest(row for row in listed if row["pair"] == "K16V16")
        if best is not None:
            figures = (_against(best, listed, load, column, copied) for column in columns)
            bf16 = f"{best['seconds'] * 1e6:.1f} us, {best['kernel']} ({_rate(best, copied)})"
            failed = ", ".join(f"{row['kernel']} ({row['why']})" for row in listed if not row["seconds"])
            cells.append([*map(str, load), bf16, *figures, failed])
    if not cells:
        return []
    return [
        "\n## Decode: one layer, random slots, page size 1, rows from memory\n",
        "Times as fast as the fastest bf16 of the same batch, in brackets TB/s and the share of the copy's.\n",
        *Table(["shape", "batch", "length", "fastest bf16", *heads, "did not run"], cells).markdown(),
    ]


def _against(
    best: Row, rows: list[Row], load: tuple[str, int, int], column: tuple[str, str, str], copied: float
) -> str:
    row = fastest(row for row in rows if (row["pair"], row["kernel"], row["kind"]) == column)
    if row is None:
        return NOT_MEASURED
    floor = FLOOR if load[2] <= SHORT else None
    limit = GOALS.get(load, {}).get(column[0], floor) if column[1] == "ours" else None
    return f"{goal(best['seconds'] / row['seconds'], limit)} ({_rate(row, copied)})"


def _tokens_per_s(row: Row) -> str:
    return f"{row['tokens_per_s']:,.0f}" if row["seconds"] else str(row.get("why", NOT_MEASURED))


def _of_bf16_step(rows: list[Row], row: Row) -> str:
    best = fastest(other for other in rows if (other["what"], other["kind"]) == (row["what"], "bf16"))
    if best is None or not row["seconds"]:
        return NOT_MEASURED
    return goal(row["tokens_per_s"] / best["tokens_per_s"], MODEL_GOALS[row["what"]] if row["kind"] == "K4V4" else None)


def _of_bf16_store(rows: list[Row], row: Row) -> str:
    best = fastest(other for other in rows if (other["tokens"], other["pair"]) == (row["tokens"], "K16V16"))
    if best is None or not row["seconds"]:
        return NOT_MEASURED
    return goal(row["seconds"] / best["seconds"], None if row["pair"] == "K16V16" else STORE_GOAL, at_most=True)


def _of_bf16_prefill(rows: list[Row], row: Row) -> str:
    load = ("shape", "batch", "prefix", "tokens")
    same = (other for other in rows if all(other[name] == row[name] for name in load))
    best = fastest(other for other in same if other["pair"] == "K16V16")
    if best is None or not row["seconds"]:
        return NOT_MEASURED
    return f"{best['seconds'] / row['seconds']:.2f}x"


def _of_wide_pages(rows: list[Row], row: Row) -> str:
    wide = next((other for other in rows if other["pair"] == row["pair"] and other["page_size"] == 16), row)
    return f"{wide['seconds'] / row['seconds']:.2f}x"


def _rate(row: Row, copied: float) -> str:
    rate = row["bytes"] / row["seconds"]
    return f"{rate / 1e12:.2f} TB/s, {rate / copied:.0%}"


def _time(copied: float, row: Row) -> str:
    if not row["seconds"]:
        return str(row.get("why", NOT_MEASURED))
    return f"{row['seconds'] * 1e6:.1f}" + (f" ({_rate(row, copied)})" if "bytes" in row else "")


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        heads = f", {value['heads']} heads" if value.get("heads", 1) > 1 else ""
        return "/".join(str(value[name]) for name in ("tokens", "warps", "stages")) + heads
    return NOT_MEASURED if value is None else str(value)
