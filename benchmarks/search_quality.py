"""The KL that each search method reaches on the report split, at comparable numbers of forward passes.

    python benchmarks/search_quality.py --model demo --out runs/quality --seeds 0 1 2 --json F.json --markdown F.md

Goal: per-layer bits are worth their search, beside the best uniform with the same grids, transforms and window.

Every method chooses from the same candidates (the menus of the exact solver, with their best transforms) under the same
budget, and measures configurations on the select split. `exact` and `greedy` measure none. `exact+refined` is what
`kvtuner search` does with `--trials`: it alone ends the measurement of what is clearly worse early, and keeps the exact
solution unless a trial is clearly better. `cold` samplers start from nothing, by Optuna alone; trials beyond the budget
are theirs to avoid, are not measured, and leave them `none` if nothing else was tried. `nsga2 cold, asked again`
proposes until it is inside the budget, and has as many more trials as the isolated forwards that exact needs are worth:
so it makes more forward passes than exact+refined. The table says how many sequences each method ran on the select
split.

With `--context` a budget holds the copies of the exact window in a request of so many tokens: rows get what is left,
and all have equal stored bytes there. Measurements are journalled: a stopped run resumes, and more seeds are added by
asking for them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import optuna
from search_parts.greedy import greedy

from kvtuner.calibration.isolated.candidates import isolated_candidates, isolated_sequences
from kvtuner.cli.command import add_options, add_switch
from kvtuner.errors import BudgetError, SearchSpaceError
from kvtuner.evaluation.validation import SequenceSums, Validator, kl_difference, pooled
from kvtuner.pipeline.flags.option_fields import options_from
from kvtuner.pipeline.options import DataOptions, MeasurementOptions, ModelOptions, SearchOptions
from kvtuner.pipeline.stages.baseline_comparison import scheme_of
from kvtuner.pipeline.stages.budget_search import BudgetSearch
from kvtuner.pipeline.stages.search_run import SearchRun, checked_shape, measure_sensitivity
from kvtuner.precision import WIDEST_PACKED_BITS, bytes_per_token
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
    from collections.abc import Mapping, Sequence

    from kvtuner.precision import ExactWindow, PrecisionPair
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
REFINED: Final = "exact+refined"


def rows_budget(text: str, window: ExactWindow, context: int | None) -> Budget:
    """The budget of rows alone: what the window's copies leave of `text` in a request of `context` tokens.

    Raises:
        BudgetError: A budget that is not of bits for each element, or one that the copies alone exceed.
    """
    budget = Budget.parse(text)
    if context is None or not window.num_tokens:
        return budget
    if budget.kind not in ("mean_bits", "effective_bits"):
        raise BudgetError(f"--context takes a window's bits from budgets such as 3bit or 4bpe, not {text}")
    left = budget.amount - window.bits_at(context)
    if left <= 0:
        raise BudgetError(f"{window} take more than {text} at {context} tokens; give a larger --context")
    return replace(budget, amount=left)


@dataclass(frozen=True)
class CalibratedModel(BudgetSearch):
    """A calibrated model on which search methods are compared; a context counts the copies of the window in bytes."""

    validator: Validator
    context: int | None = None

    @property
    def window(self) -> ExactWindow:
        """The exact window of all configurations."""
        return self.run.bench.options.quant.window

    def measured(self, configuration: Configuration, *, transforms: bool = True) -> SequenceSums:
        """The results on the report split, small and large position offsets pooled."""
        scheme = scheme_of(self.run, "a configuration", configuration, transforms=transforms)
        return pooled([self.validator.measure(scheme, offsets) for offsets in ("small", "large")])

    def report_kl(self, configuration: Configuration, *, transforms: bool = True) -> float:
        """The mean KL on the report split over small and large position offsets."""
        sums = self.measured(configuration, transforms=transforms)
        return sum(sums.kl) / sum(sums.count)

    def stored_bits(self, configuration: Configuration) -> float:
        """Stored bits of an element, with scales and padding, and with the window's copies if there is a context."""
        rows = self.run.rows
        elements = len(configuration) * rows.num_kv_heads * (rows.head_dim + rows.v_head_dim)
        copies = 0.0 if self.context is None else float(self.window.bits_at(self.context))
        return 8 * bytes_per_token(pairs_of(configuration), rows) / elements + copies

    def uniform_kl_at(self, stored_bits: float) -> float:
        """The KL that uniforms with the best transforms would have in as many stored bits, by their own KL.

        It is interpolated, as the logarithm, between the neighbours on the front of uniforms whose keys have at least
        the bits of their values.
        """
        near = {
            pair: (self.stored_bits(uniform), uniform)
            for pair, uniform in self.uniforms().items()
            if WIDEST_PACKED_BITS >= pair.k_bits >= pair.v_bits and abs(self.stored_bits(uniform) - stored_bits) <= 1
        }
        return kl_at([(bits, self.report_kl(uniform)) for bits, uniform in near.values()], stored_bits)

    def problem(self, budget: str) -> tuple[SearchSpace, Constraint]:
        """The search space and the constraint of a budget."""
        rows = self.run.rows
        geometry = self.run.shape.geometry
        constraint = rows_budget(budget, self.window, self.context).constraint(geometry, rows.k_layout, rows.v_layout)
        return self.space(constraint), constraint

    def starts(self, space: SearchSpace, constraint: Constraint, trials: int) -> list[Configuration]:
        """The warm starts of `kvtuner search`: the exact front, and the uniforms inside the budget."""
        return warm_starts(space, constraint, list(self.uniforms().values()), min(trials, POPULATION_SIZE))

    def searched(
        self, space: SearchSpace, constraint: Constraint, warm: list[Configuration], **settings: Any
    ) -> tuple[Configuration | None, int]:
        """The best configuration of a study, None if nothing kept the budget; and the sequences it ran.

        Args:
            space: The search space.
            constraint: The budget.
            warm: The configurations that are tried first; the exact solution leads, if there are any.
            **settings: The sampler, the guidance, the number of trials and the seed; see `refine`.
        """
        before = self.objective.num_sequences
        race = self.objective.against if settings["guidance"] == "surrogate" else None
        try:
            study = refine(space, constraint, self.objective, warm=warm, race=race, **settings)
        except SearchSpaceError:
            return None, 0
        sequences = self.objective.num_sequences - before
        return self.chosen(warm[0], study)[0] if warm else study.best, sequences


def kl_at(points: Sequence[tuple[float, float]], stored_bits: float) -> float:
    """The KL in so many stored bits on the front of `points` (bits, KL); that of its end beyond it.

    Between two points the logarithm of the KL is linear.
    """
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    bits, logs = zip(*((bits, math.log(kl)) for bits, kl in front), strict=True)
    return math.exp(float(np.interp(stored_bits, bits, logs)))


def prepare(source: str, out: Path, args: argparse.Namespace, measurement: MeasurementOptions) -> CalibratedModel:
    """Load a model, calibrate it, and open the journals in its own folder."""
    data = DataOptions(data=args.data, sequence_length=args.sequence_length, sequences=tuple(args.sequences))
    # Each comparison sets budgets of its own; that of the options is not read.
    options = SearchOptions(model=ModelOptions(model=source), data=data, measurement=measurement, budget=("4bit",))
    folder = RunFolder(out)
    phases, table = measure_sensitivity(options, checked_shape(options), folder, phase="calibration")
    bench, identity = phases.bench, sha256_of(table.identity)
    objective = MeasuredKL(bench.simulator("select", reuse=True), table, bench.options.quant, folder, identity)
    run = SearchRun(options, phases, table)
    return CalibratedModel(run, objective, Validator(bench, folder, identity), args.context)


def best_uniform(
    model: CalibratedModel, constraint: Constraint, *, transforms: bool
) -> tuple[PrecisionPair, Configuration]:
    """The best uniform on the report split itself, of those inside the budget that none exceeds on both sides."""
    inside = [pair for pair in model.uniforms() if constraint.is_met([pair] * constraint.num_layers)]
    widest = [
        pair
        for pair in inside
        if not any(other != pair and other.k_bits >= pair.k_bits and other.v_bits >= pair.v_bits for other in inside)
    ]
    uniforms = {pair: model.run.uniform(pair, transforms=transforms) for pair in widest}
    best = min(uniforms, key=lambda pair: (model.report_kl(uniforms[pair], transforms=transforms), str(pair)))
    return best, uniforms[best]


def compare(model: CalibratedModel, budget: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    space, constraint = model.problem(budget)
    pair, uniform = best_uniform(model, constraint, transforms=True)
    row: dict[str, Any] = {"budget": budget, "uniform+t": model.report_kl(uniform), "uniform+t_name": str(pair)}
    if args.plain:
        pair, plain = best_uniform(model, constraint, transforms=False)
        row |= {"uniform": model.report_kl(plain, transforms=False), "uniform_name": str(pair)}
    for name, solver in (("exact", solve), ("greedy", greedy)):
        if name in args.methods:
            row[name] = model.report_kl(solver(space, constraint))
    for name in SEARCHES:
        if name in args.methods:
            row[name], best = compare_search(model, name, space, constraint, args)
            if name == REFINED and best is not None:
                row |= beside_uniform(model, best, uniform)
    return row


def compare_search(
    model: CalibratedModel, name: str, space: SearchSpace, constraint: Constraint, args: argparse.Namespace
) -> tuple[dict[str, Any], Configuration | None]:
    """The KL on both splits and the sequences of a search with every seed, and the first seed's best configuration."""
    sampler, guidance = SEARCHES[name]
    warm = model.starts(space, constraint, args.trials) if guidance == "surrogate" else []
    table = model.run.table
    sequences = isolated_sequences(table.geometry.num_layers, args.sequences[0])
    isolated = len(isolated_candidates(table.scores)) * sequences // 2
    more = -(-isolated // args.sequences[1]) if guidance == "budget" else 0
    settings = {"sampler": sampler, "guidance": guidance, "num_trials": args.trials + more}
    results = [model.searched(space, constraint, warm, seed=seed, **settings) for seed in args.seeds]
    kls = [math.inf if best is None else model.report_kl(best) for best, _ in results]
    selected = [math.inf if best is None else model.objective(best) for best, _ in results]
    return {"kl": kls, "select_kl": selected, "sequences": [sequences for _, sequences in results]}, results[0][0]


def beside_uniform(model: CalibratedModel, refined: Configuration, uniform: Configuration) -> dict[str, Any]:
    """The refined configuration of the first seed, its stored bits, and its KL beside that of uniforms alike."""
    difference = kl_difference(model.measured(refined), model.measured(uniform), seed=0)
    return {
        "pairs": " ".join(map(str, pairs_of(refined))),
        "stored_bits": model.stored_bits(refined),
        "uniform+t_stored_bits": model.stored_bits(uniform),
        "less_uniform+t": [difference.mean, difference.low, difference.high],
        "uniforms_in_as_many": model.uniform_kl_at(model.stored_bits(refined)),
    }


def cell(value: float | dict[str, list[float]]) -> str:
    """The text of a figure; for a method with seeds the median, the worst, and the number of sequences."""
    if isinstance(value, float):
        return "none" if math.isinf(value) else f"{value:.3g}"
    middle, worst = cell(statistics.median(value["kl"])), cell(max(value["kl"]))
    return f"{middle} (worst {worst}; {statistics.median(value['sequences']):.0f} sequences)"


def uniform_text(row: Mapping[str, Any], name: str) -> str:
    """The KL and the pair of a uniform; a dash where it was not measured."""
    return f"{row[name]:.3g} ({row[f'{name}_name']})" if name in row else "-"


def markdown(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """The table in Markdown."""
    methods = [method for method in METHODS if method in args.methods]
    names = (
        {"uniform": "best plain uniform", "uniform+t": "best uniform"} if args.plain else {"uniform+t": "best uniform"}
    )
    header = ["budget", *names.values(), *methods]
    if REFINED in methods:
        header += [f"{REFINED} / {name}" for name in names.values()] + ["/ uniforms in as many stored bits"]
    cells = []
    for row in rows:
        cells.append([row["budget"], *(uniform_text(row, name) for name in names), *(cell(row[m]) for m in methods)])
        if REFINED in methods:
            refined = statistics.median(row[REFINED]["kl"])
            cells[-1] += [f"{refined / row[name]:.2f}" for name in names]
            cells[-1].append(f"{row[REFINED]['kl'][0] / row['uniforms_in_as_many']:.2f}")
    note = (
        f"KL, nats per token, on the report split, small and large offsets pooled. Model {args.model};"
        f" sequences {args.sequences} of {args.sequence_length} tokens; {args.trials} trials;"
        f" seeds {args.seeds}; NSGA-II population {POPULATION_SIZE}; measured {settings_text(args)}."
    )
    return "\n".join([*Table(header, cells).markdown(), "", note, ""])


def settings_text(args: argparse.Namespace) -> str:
    """The flags of the measurement that are not their defaults, as they are typed, and the context."""
    measurement, defaults = options_from(MeasurementOptions, vars(args)), MeasurementOptions()
    flags = []
    for name in MeasurementOptions.__slots__:
        value = getattr(measurement, name)
        if value != getattr(defaults, name):
            flag = name.replace("_", "-")
            switch = f"--{flag}" if value else f"--no-{flag}"
            flags.append(switch if isinstance(value, bool) else f"--{flag} {value}")
    flags += [] if args.context is None else [f"--context {args.context}"]
    return f"with {' '.join(flags)}" if flags else "by default"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every comparison of searches has."""
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--sequences", type=int, nargs=3, default=[4, 12, 48])
    parser.add_argument("--context", type=int, help="tokens of a request in which a window's copies count as stored")
    add_switch(parser, "--plain", "also measure uniforms without transforms", default=True)
    parser.add_argument("--json", type=Path, help="file for the figures")


def add_measurement(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `kvtuner search` that decide what is measured."""
    add_options(parser, MeasurementOptions(), "measurement, as of `kvtuner search`")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    add_measurement(parser)
    parser.add_argument("--budgets", nargs="+", default=["2.5bit", "3bit", "3.5bit", "4bit", "5bit", "6bit"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods to compare")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of samplers")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args(argv)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    model = prepare(args.model, args.out, args, options_from(MeasurementOptions, vars(args)))
    rows = []
    for budget in args.budgets:
        rows.append(compare(model, budget, args))
        print(json.dumps(rows[-1]), flush=True)
    table = markdown(rows, args)
    print(table)
    if args.json:
        args.json.write_text(json.dumps({"settings": settings_text(args), "rows": rows}, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
