"""``kvtuner calibrate``: the sensitivity table alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvtuner.calibration.model_loading import read_shape
from kvtuner.calibration.sensitivity import TABLE_FILE
from kvtuner.calibration.workbench import calibrate
from kvtuner.pipeline.dry_run import plan_of_work, print_plan
from kvtuner.pipeline.progress import say
from kvtuner.pipeline.session import Phases, calibration_options, model_source, prepare, run_folder

if TYPE_CHECKING:
    from argparse import Namespace


def run(args: Namespace) -> int:
    """Run the sub-command."""
    shape = read_shape(model_source(args))
    calibration_options(args, shape)
    if args.dry_run:
        print_plan(plan_of_work(args, shape, []), as_json=args.json)
        return 0
    folder = run_folder(args, "calibration")
    bench = prepare(args, shape)
    folder.create()
    phases = Phases(bench, folder)
    with phases.phase("calibrate"):
        table = calibrate(bench, folder, say)
    result = {
        "table": str(folder.file(TABLE_FILE)),
        "candidates": len(table.scores),
        "isolated_kl": sum(scores.kl is not None for scores in table.scores.values()),
        "forward_passes": round(phases.passes["calibrate"], 2),
    }
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        say(f"{result['candidates']} candidates, {result['isolated_kl']} with isolated KL: {result['table']}")
    return 0
