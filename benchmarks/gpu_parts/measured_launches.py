"""Launch settings that a sweep found fastest, put into the table that servers read."""

from __future__ import annotations

import collections
import json
import math
from typing import TYPE_CHECKING, Any, Final

from kvtuner.precision import PrecisionPair

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Row = dict[str, Any]
HEAD_DIM: Final = 128
"""The head dimension of the shapes that a sweep times, which have one scale for a head."""
SETTINGS: Final = ("tokens", "warps", "stages")


def winners(rows: Iterable[Row]) -> dict[str, Row]:
    """The settings of each pair with the least product of times over all loads, each by its best number of splits.

    Settings that did not run at some load are none; where two are as fast, the first timed wins.
    """
    best: dict[str, dict[str, dict[tuple[int, int], float]]] = collections.defaultdict(dict)
    loads: dict[str, set[tuple[int, int]]] = collections.defaultdict(set)
    for row in rows:
        load = (row["batch"], row["length"])
        loads[row["pair"]].add(load)
        times = best[row["pair"]].setdefault(json.dumps(row["launch"]), {})
        if row["seconds"]:
            times[load] = min(times.get(load, math.inf), row["seconds"])
    chosen = {}
    for pair, settings in best.items():
        complete = {launch: times for launch, times in settings.items() if set(times) == loads[pair]}
        if complete:
            fastest = min(complete, key=lambda launch: sum(map(math.log, complete[launch].values())))
            chosen[pair] = json.loads(fastest)
    return chosen


def with_winners(table: dict[str, Any], arch: str, chosen: dict[str, Row], device: str) -> dict[str, Any]:
    """The table with these settings on one architecture, whose rows leave those of others as they are.

    What follows from machine code, such as the programs that a processor holds, stays where the settings stay; of other
    settings it is scaled by the warps.
    """
    rows: list[Row] = []
    for row in table["rows"]:
        pair = str(PrecisionPair(row["k_bits"], row["v_bits"]))
        applies = arch in row["archs"] and row["head_dim"] == HEAD_DIM and row["groups"] == 1 and pair in chosen
        kind = "joined" if applies and chosen[pair].get("heads", 1) > 1 else "launch"
        before = row.get(kind, row["launch"])
        if not applies or (_kind_of(row) == kind and all(before[name] == chosen[pair][name] for name in SETTINGS)):
            rows.append(row)
            continue
        others = [name for name in row["archs"] if name != arch]
        rows += [{**row, "archs": others}] if others else []
        launch = {**before, **{name: chosen[pair][name] for name in (*SETTINGS, "heads") if name in chosen[pair]}}
        launch["resident"] = max(1, before["resident"] * before["warps"] // launch["warps"])
        # Where one head of a program was faster than two, no program has two.
        kept = {name: value for name, value in row.items() if kind == "joined" or not name.startswith("joined")}
        rows.append({**kept, "archs": [arch], kind: launch, "timed_on": device})
    return {**table, "rows": rows, "measured": f"machine code; time on {device} where a row says so"}


def _kind_of(row: Row) -> str:
    """The settings that a row has for the heads that a sweep times."""
    return "joined" if "joined" in row else "launch"


def write_table(path: Path, table: dict[str, Any]) -> None:
    """Write a table with a line for each row, as benchmarks/launch_table.py does."""
    lines = ",\n".join("  " + json.dumps(row) for row in table["rows"])
    head = json.dumps({**table, "rows": None}, indent=1).replace("null", "[\n" + lines + "\n ]")
    path.write_text(head + "\n")
