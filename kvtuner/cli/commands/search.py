"""``kvtuner search``: from a model to profiles, each with its proof."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtuner.calibration.model_loading import read_shape
from kvtuner.calibration.workbench import calibrate
from kvtuner.cli.shareable_command import search_said
from kvtuner.evaluation.validation import Validator
from kvtuner.pipeline.dry_run import plan_of_work, print_plan
from kvtuner.pipeline.optimization import BudgetSearch
from kvtuner.pipeline.outcome import finish
from kvtuner.pipeline.progress import say
from kvtuner.pipeline.session import Phases, SearchRun, calibration_options, model_source, prepare, run_folder
from kvtuner.pipeline.targets import refuse_other_targets, targets_of
from kvtuner.report.search_report import terminal_table
from kvtuner.run_folder import sha256_of
from kvtuner.tuner.objective import MeasuredKL

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from kvtuner.pipeline.targets import SearchTarget


def run(args: Namespace) -> int:
    """Run the sub-command."""
    shape = read_shape(model_source(args))
    calibration_options(args, shape)
    targets = targets_of(args, shape)
    if args.dry_run:
        print_plan(plan_of_work(args, shape, targets), as_json=args.json)
        return 0
    command = search_said(args)
    folder = run_folder(args, "+".join(target.name for target in targets))
    refuse_other_targets(folder, targets)
    bench = prepare(args, shape)
    folder.create()
    phases = Phases(bench, folder)
    with phases.phase("calibration"):
        table = calibrate(bench, folder, say)
    results = _search(SearchRun(args, command, shape, bench, folder, phases, table), targets)
    if args.json:
        print(json.dumps(results[0] if len(results) == 1 else results, indent=1))
    return 0


def _search(run: SearchRun, targets: Sequence[SearchTarget]) -> list[dict[str, Any]]:
    """Make every target's profile; returns what ``--json`` prints."""
    identity = sha256_of(run.table.identity)
    with run.phases.phase("uniform table"):
        simulator = run.bench.simulator("select", reuse=True)
        finder = BudgetSearch(run, MeasuredKL(simulator, run.table, run.bench.options.quant, run.folder, identity))
        uniform_kl = finder.uniform_table()
    family = finder.family(targets) if run.args.nested else [None] * len(targets)
    validator = Validator(run.bench, run.folder, identity)
    results = []
    for target, member in zip(targets, family, strict=True):
        found = finder.find(target, member, uniform_kl)
        with run.folder.lock("finish.lock", waiting="another worker validates"), run.phases.phase("validation"):
            data, result = finish(run, target, found, validator)
        if not run.args.json:
            print(terminal_table(data))
            report = result["report"] or f"not written; kvtuner report {run.folder.path} does so"
            print(f"\nprofile: {result['profile']}\nreport:  {report}\n")
        results.append(result)
    return results
