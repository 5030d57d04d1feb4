"""``kvtuner plan``: what fits a GPU by each cache scheme, and what a search for it takes, before weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner.cli.command import Command, add_options
from kvtuner.pipeline.flags.option_fields import options_from
from kvtuner.pipeline.planning.plan_options import PlanOptions

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def _run(args: Namespace) -> int:
    from kvtuner.pipeline.planning.capacity_plan import make_plan
    from kvtuner.pipeline.planning.plan_text import capacity_lines

    plan = make_plan(options_from(PlanOptions, vars(args)))
    if args.html:
        from kvtuner.cli.output_file import write_page
        from kvtuner.pipeline.planning.plan_page import capacity_page

        write_page(Path(args.html), capacity_page(plan))
    page = {"page": args.html} if args.html else {}
    if args.json:
        print(json.dumps({**plan.to_json(), **page}, indent=1))
        return 0
    print("\n".join(capacity_lines(plan)))
    if args.html:
        print(f"\npage: {args.html}")
    return 0


def _add_flags(parser: ArgumentParser) -> None:
    add_options(parser, PlanOptions)
    parser.add_argument("--html", metavar="FILE", help="write a page with a chart that needs nothing else")


COMMANDS: Final = (
    Command("plan", "what fits your GPUs by each scheme and budget, and what a search takes", _add_flags, _run),
)
