"""``kvtuner eval``: is the answer still right, beside the unquantized model and what else its bytes could be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvtuner.pipeline.evaluate import evaluate
from kvtuner.pipeline.evaluation_options import EvalOptions
from kvtuner.pipeline.options import options_from
from kvtuner.pipeline.progress import say
from kvtuner.report.evaluation_report import evaluation_lines

if TYPE_CHECKING:
    from argparse import Namespace


def run(args: Namespace) -> int:
    """Run the sub-command."""
    result = evaluate(options_from(EvalOptions, vars(args)))
    if args.json:
        print(json.dumps({"evaluation": str(result.file), **result.evaluation.model_dump(mode="json")}, indent=1))
        return 0
    print("\n".join(evaluation_lines(result.evaluation, result.profile)))
    say(f"\nwritten to {result.file}; `kvtuner show {result.file.parent}` shows it again")
    if result.samples is not None:
        say(f"what every way says after the same beginnings, side by side: {result.samples}")
    return 0
