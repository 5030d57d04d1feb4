"""``kvtuner search``: from a model to profiles, each with its proof."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvtuner.pipeline.dry_run import plan_lines, plan_of_work
from kvtuner.pipeline.options import SearchOptions, options_from
from kvtuner.pipeline.search import search
from kvtuner.report.search_report import terminal_table

if TYPE_CHECKING:
    from argparse import Namespace

    from kvtuner.pipeline.search import SearchResult


def run(args: Namespace) -> int:
    """Run the sub-command."""
    options = options_from(SearchOptions, vars(args))
    if args.dry_run:
        plan = plan_of_work(options)
        print(json.dumps(plan, indent=1) if args.json else "\n".join(plan_lines(plan)))
        return 0
    results = search(options, on_result=None if args.json else _print_result)
    if args.json:
        printed = [result.to_json() for result in results]
        print(json.dumps(printed[0] if len(printed) == 1 else printed, indent=1))
    return 0


def _print_result(result: SearchResult) -> None:
    report = result.report or f"not written; kvtuner report {result.file.parent} does so"
    print(f"{terminal_table(result.data)}\n\nprofile: {result.file}\nreport:  {report}\n")
