"""``kvtuner calibrate``: the sensitivity table alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvtuner.pipeline.calibrate import calibrate
from kvtuner.pipeline.dry_run import plan_lines, plan_of_work
from kvtuner.pipeline.options import CalibrateOptions, options_from
from kvtuner.pipeline.progress import say

if TYPE_CHECKING:
    from argparse import Namespace


def run(args: Namespace) -> int:
    """Run the sub-command."""
    options = options_from(CalibrateOptions, vars(args))
    if args.dry_run:
        plan = plan_of_work(options)
        print(json.dumps(plan, indent=1) if args.json else "\n".join(plan_lines(plan)))
        return 0
    result = calibrate(options).to_json()
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        say(f"{result['candidates']} candidates, {result['isolated_kl']} with isolated KL: {result['table']}")
    return 0
