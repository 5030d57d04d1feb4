"""The KL that each search method reaches on the report split, at comparable numbers of forward passes.

    python benchmarks/search_quality.py --model demo --out runs/quality --seeds 0 1 2 --markdown table.md

Every method chooses from the same candidates (the menus of the exact solver, with their best transforms) under the same
budget, and measures configurations on the select split. `exact` and `greedy` measure none. `exact+refined` is what
`kvtuner search` does with `--trials`: it alone ends the measurement of what is clearly worse early. `cold` samplers
start from nothing, by Optuna alone; trials beyond the budget are theirs to avoid, are not measured, and leave them
`none` if nothing else was tried. `nsga2 cold, asked again` proposes until it is inside the budget, and has as many more
trials as the isolated forwards that exact needs are worth: so it makes more forward passes than exact+refined. The
table says how many sequences each method ran on the select split.
Measurements are journalled: a stopped run resumes, and more seeds are added by asking for them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import optuna
from greedy import greedy

from kvtuner.calibration.isolated_kl import isolated_candidates
from kvtuner.errors import SearchSpaceError
from kvtuner.evaluation.validation import SequenceSums, Validator, pooled
from kvtuner.pipeline.options import DataOptions, ModelOptions, SearchOptions
from kvtuner.pipeline.stages.baseline_comparison import scheme_of
from kvtuner.pipeline.stages.budget_search import BudgetSearch
from kvtuner.pipeline.stages.search_run import SearchRun, checked_shape, measure_sensitivity
from kvtuner.report.table import Table
from kvtuner.run_folder import RunFolder, sha256_of
from kvtuner.search_spaces.budget import Budget
from kvtuner.search_spaces.space import pairs_of
from kvtuner.tuner.exact_solver import solve
from kvtuner.tuner.objective import MeasuredKL
from kvtuner.tuner.samplers import POPULATION_SIZE
from kvtuner.tuner.study import refine
from kvtuner.tuner.warm_starts import warm_starts

if TYPE_CHECKING:
    from kvtuner.search_spaces.budget import Constraint
    from kvtuner.search_spaces.space import Configuration, SearchSpace


SEARCHES: Final = {
    "exact+refined": ("nsga2", "surrogate"),
    "nsga2 cold": ("nsga2", "none"),
    "nsga2 cold, asked again": ("nsga2", "budget"),
    "tpe cold": ("tpe", "none"),
    "random": ("random", "none"),
}
"""The sampler and the guidance of each method that measures configurations; with a surrogate it starts warm."""
METHODS: Final = ("exact", "greedy", *SEARCHES)


@dataclass(frozen=True)
class CalibratedModel(BudgetSearch):
    """A calibrated model on which search methods are compared."""

    validator: Validator

    def report_kl(self, configuration: Configuration, name: str, *, transforms: bool = True) -> float:
        """The mean KL on the report split over small and large position offsets."""
        scheme = scheme_of(self.run, name, configuration, transforms=transforms)
        sums: SequenceSums = pooled([self.validator.measure(scheme, offsets) for offsets in ("small", "large")])
        return sum(sums.kl) / sum(sums.count)

    def problem(self, budget: str) -> tuple[SearchSpace, Constraint]:
        """The search space and the constraint of a budget."""
        constraint = Budget.parse(budget).constraint(self.run.shape.geometry)
        return self.space(constraint), constraint

    def starts(self, space: SearchSpace, constraint: Constraint, trials: int) -> list[Configuration]:
        """The warm starts of `kvtuner search`: the exact front, and the uniforms inside the budget."""
        return warm_starts(space, constraint, list(self.uniforms().values()), min(trials, POPULATION_SIZE))

    def searched(
        self, space: SearchSpace, constraint: Constraint, warm: list[Configuration], **settings: Any
    ) -> tuple[float, int]:
        """The KL of a study's best on the report split, infinite if nothing kept the budget; and the sequences it ran.

        Args:
            space: The search space.
            constraint: The budget.
            warm: The configurations that are tried first.
            **settings: The sampler, the guidance, the number of trials and the seed; see `refine`.
        """
        before = self.objective.num_sequences
        race = self.objective.against if settings["guidance"] == "surrogate" else None
        try:
            study = refine(space, constraint, self.objective, warm=warm, race=race, **settings)
        except SearchSpaceError:
            return math.inf, 0
        return self.report_kl(study.best, settings["sampler"]), self.objective.num_sequences - before


def prepare(source: str, out: Path, args: argparse.Namespace) -> CalibratedModel:
    """Load a model, calibrate it, and open the journals in its own folder."""
    data = DataOptions(data=args.data, sequence_length=args.sequence_length, sequences=tuple(args.sequences))
    # Each comparison sets budgets of its own; that of the options is not read.
    options = SearchOptions(model=ModelOptions(model=source), data=data, budget=("4bit",))
    folder = RunFolder(out)
    phases, table = measure_sensitivity(options, checked_shape(options), folder, phase="calibration")
    bench, identity = phases.bench, sha256_of(table.identity)
    objective = MeasuredKL(bench.simulator("select", reuse=True), table, bench.options.quant, folder, identity)
    run = SearchRun(options, phases, table)
    return CalibratedModel(run, objective, Validator(bench, folder, identity))


def best_uniform(model: CalibratedModel, constraint: Constraint, *, transforms: bool) -> tuple[str, float]:
    """The uniform inside the budget that is best on the report split itself: the strongest baseline."""
    measured = []
    for pair in model.uniforms():
        configuration = model.run.uniform(pair, transforms=transforms)
        if constraint.is_met(pairs_of(configuration)):
            measured.append((model.report_kl(configuration, str(pair), transforms=transforms), str(pair)))
    kl, name = min(measured)
    return name, kl


def compare(model: CalibratedModel, budget: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    space, constraint = model.problem(budget)
    warm = model.starts(space, constraint, args.trials)
    row: dict[str, Any] = {"budget": budget}
    for name, transforms in (("uniform", False), ("uniform+t", True)):
        pair, row[name] = best_uniform(model, constraint, transforms=transforms)
        row[f"{name}_name"] = pair
    row["exact"] = model.report_kl(solve(space, constraint), "exact")
    row["greedy"] = model.report_kl(greedy(space, constraint), "greedy")
    isolated = len(isolated_candidates(model.run.table.scores)) * args.sequences[0] // 2
    more = args.trials + -(-isolated // args.sequences[1])
    for name, (sampler, guidance) in SEARCHES.items():
        start, trials = warm if guidance == "surrogate" else [], more if guidance == "budget" else args.trials
        settings = {"sampler": sampler, "guidance": guidance, "num_trials": trials}
        results = [model.searched(space, constraint, start, seed=seed, **settings) for seed in args.seeds]
        row[name] = {"kl": [kl for kl, _ in results], "sequences": [sequences for _, sequences in results]}
    return row


def cell(value: float | dict[str, list[float]]) -> str:
    """The text of a figure; for a method with seeds the median, the worst, and the number of sequences."""
    if isinstance(value, float):
        return "none" if math.isinf(value) else f"{value:.3g}"
    middle, worst = cell(statistics.median(value["kl"])), cell(max(value["kl"]))
    return f"{middle} (worst {worst}; {statistics.median(value['sequences']):.0f} sequences)"


def markdown(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """The table in Markdown."""
    header = ["budget", "best plain uniform", "best uniform", *METHODS, "exact+refined / best plain uniform"]
    cells = []
    for row in rows:
        ratio = statistics.median(row["exact+refined"]["kl"]) / row["uniform"]
        uniforms = [f"{row[name]:.3g} ({row[f'{name}_name']})" for name in ("uniform", "uniform+t")]
        cells.append([row["budget"], *uniforms, *(cell(row[method]) for method in METHODS), f"{ratio:.2f}"])
    note = (
        f"KL, nats per token, on the report split, small and large offsets pooled. Model {args.model};"
        f" sequences {args.sequences} of {args.sequence_length} tokens; {args.trials} trials;"
        f" seeds {args.seeds}; NSGA-II population {POPULATION_SIZE}."
    )
    return "\n".join([*Table(header, cells).markdown(), "", note, ""])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every comparison of searches has."""
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--sequences", type=int, nargs=3, default=[4, 12, 48])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--budgets", nargs="+", default=["2.5bit", "3bit", "3.5bit", "4bit", "5bit", "6bit"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    model = prepare(args.model, args.out, args)
    rows = []
    for budget in args.budgets:
        rows.append(compare(model, budget, args))
        print(json.dumps(rows[-1]), flush=True)
    table = markdown(rows, args)
    print(table)
    if args.markdown:
        args.markdown.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
