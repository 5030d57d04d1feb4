"""``kvtuner search``: from a model to profiles, each with its proof."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtuner.calibration.calibrate import calibrate
from kvtuner.calibration.model import read_shape
from kvtuner.cli.dry_run import plan_of_work, print_plan
from kvtuner.cli.finder import Finder, Target
from kvtuner.cli.outcome import finish
from kvtuner.cli.session import Phases, SearchRun, calibration_options, model_source, prepare, run_folder
from kvtuner.errors import BudgetError, SearchSpaceError
from kvtuner.evaluation.report import terminal_table
from kvtuner.evaluation.validation import Validator
from kvtuner.run_folder import sha256_of
from kvtuner.search_spaces.budget import Budget
from kvtuner.search_spaces.ranges import check_layers, parse_keep, parse_ranges
from kvtuner.tuner.objective import MeasuredKL

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from kvtuner.calibration.model import ModelShape


def run(args: Namespace) -> int:
    """Run the sub-command."""
    shape = read_shape(model_source(args))
    calibration_options(args, shape)
    targets = _targets(args, shape)
    if args.dry_run:
        budgets = [(t.constraint.budget, t.constraint) for t in targets if t.constraint is not None]
        print_plan(plan_of_work(args, shape, budgets), as_json=args.json)
        return 0
    folder = run_folder(args, "+".join(target.name for target in targets))
    bench = prepare(args, shape)
    folder.create()
    phases = Phases(bench, folder)
    with phases.phase("calibration"):
        table = calibrate(bench, folder)
    results = _search(SearchRun(args, shape, bench, folder, phases, table), targets)
    if args.json:
        print(json.dumps(results[0] if len(results) == 1 else results, indent=1))
    return 0


def _targets(args: Namespace, shape: ModelShape) -> list[Target]:
    """What the flags ask for, checked before anything is loaded."""
    if bool(args.budget) == bool(args.layers):
        raise BudgetError("give --budget (such as 4bit) or --layers (such as 0-1:bf16,2-27:K4V2), one of the two")
    geometry = shape.geometry
    if args.layers:
        parse_ranges(args.layers, geometry.num_layers)
        return [Target(args.layers, "layers-" + sha256_of(args.layers)[7:15], None)]
    if args.nested and args.sampler != "none":
        raise SearchSpaceError("--nested keeps the exact family, which refinement would break; add --sampler none")
    check_layers(parse_keep(args.keep) if args.keep else {}, geometry.num_layers)
    targets = []
    for text in args.budget:
        budget = Budget.parse(text)
        constraint = budget.constraint(
            geometry,
            k_group_size=args.k_group_size,
            v_group_size=args.v_group_size,
            tp_size=args.tp_size,
            pp_size=args.pp_size,
        )
        targets.append(Target(budget.text, budget.name, constraint))
    if len({target.name for target in targets}) < len(targets):
        raise BudgetError(f"a budget is given twice: {' '.join(args.budget)}")
    return targets


def _search(run: SearchRun, targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Make every target's profile; returns what ``--json`` prints."""
    identity = sha256_of(run.table.identity)
    with run.phases.phase("uniform table"):
        simulator = run.bench.simulator("select")
        finder = Finder(run, MeasuredKL(simulator, run.table, run.bench.options.quant, run.folder, identity))
        uniform_kl = finder.uniform_table()
    family = finder.family(targets) if run.args.nested else [None] * len(targets)
    validator = Validator(run.bench, run.folder, identity)
    results = []
    for target, member in zip(targets, family, strict=True):
        found = finder.find(target, member, uniform_kl)
        with run.folder.lock("finish.lock", waiting="another worker validates"), run.phases.phase("validation"):
            data, result = finish(run, target.name if len(targets) > 1 else None, found, validator)
        if not run.args.json:
            print(terminal_table(data))
            print(f"\nprofile: {result['profile']}\nreport:  {result['report']}\n")
        results.append(result)
    return results
