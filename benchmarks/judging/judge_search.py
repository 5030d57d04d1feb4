"""Whether what the search takes for granted holds on fitted grids, and what refined constants would gain.

    python benchmarks/judging/judge_search.py --model demo --out runs/judge --json judged.json

- additivity: predicted beside measured KL of the exact solutions, on the text of the prediction and on the report split
- Fisher: the isolated KL of the transform that Fisher prefers beside the best one's, at every width
- wins: how often each transform, width and pair is the best, in a menu, or in a solution
- sequences: how many of the report split the comparison with the best uniform needs
- constants: mu and lambda after some steps of Adam on the divergence, kept where the select split says so

The decisions are in docs/method.md.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from refined_constants import refined_constants

from kvtuner.calibration.isolated.forwards import measure_isolated
from kvtuner.evaluation.statistics import bootstrap_mean
from kvtuner.pipeline.options import DataOptions, MeasurementOptions, ModelOptions, SearchOptions
from kvtuner.pipeline.stages.search_run import SearchRun, checked_shape, measure_sensitivity
from kvtuner.precision import SIDES, PrecisionPair
from kvtuner.run_folder import RunFolder, sha256_of
from kvtuner.search_spaces.budget import Budget
from kvtuner.search_spaces.space import build_space, pairs_of, predicted_score
from kvtuner.tuner.exact_solver import solve
from kvtuner.tuner.objective import layer_specs

if TYPE_CHECKING:
    from kvtuner.calibration.batches import Offsets
    from kvtuner.calibration.sensitivity import SensitivityTable
    from kvtuner.search_spaces.space import Configuration

OFFSETS: Final[tuple[Offsets, Offsets]] = ("small", "large")
UNIFORMS: Final = ("K2V2", "K4V2", "K2V4", "K4V4")
COUNTS: Final = (4, 6, 8, 12, 16, 24, 32, 48)
"""Numbers of sequences at which the decision is looked at."""
SUBSETS: Final = 200


class SearchJudge:
    """A calibrated model whose candidates all have an isolated KL."""

    def __init__(self, args: argparse.Namespace) -> None:
        options = SearchOptions(
            model=ModelOptions(model=args.model),
            data=DataOptions(data=args.data, sequence_length=args.sequence_length, sequences=tuple(args.sequences)),
            measurement=MeasurementOptions(three_bits=False, word_bits="32", residual_length=0),
            budget=("4bit",),  # each part sets budgets of its own
        )
        self.folder = RunFolder(args.out)
        phases, table = measure_sensitivity(options, checked_shape(options), self.folder, phase="calibration")
        self.run = SearchRun(options, phases, table)
        self.bench, self.budgets = phases.bench, args.budgets
        self.full = self._with_all_transforms(table)
        self.known: dict[str, list[float]] = {}
        self.journal = self.folder.file("judged.json")
        if self.journal.exists():
            self.known = json.loads(self.journal.read_text())
        self.simulators: dict[tuple[str, str], Any] = {}

    def _with_all_transforms(self, table: SensitivityTable) -> SensitivityTable:
        bench, identity = self.bench, sha256_of(table.identity)
        measured = measure_isolated(
            bench.chain,
            bench.batches("calibrate"),
            list(table.scores),
            table.constants,
            plan=bench.plan,
            options=bench.options.quant,
            folder=self.folder,
            identity=identity,
        )
        return replace(table, scores={c: replace(s, kl=measured.get(c)) for c, s in table.scores.items()})

    def simulator(self, split: Any, offsets: Offsets = "random") -> Any:
        """The simulator of a split, made once."""
        if (split, offsets) not in self.simulators:
            self.simulators[split, offsets] = self.bench.simulator(split, offsets, reuse=True)
        return self.simulators[split, offsets]

    def kl(self, name: str, specs: Any, split: Any, offsets: Offsets = "random") -> list[float]:
        """The KL per token of each sequence, measured once under that name."""
        key = f"{split} {offsets} {name}"
        if key not in self.known:
            self.known[key] = self.simulator(split, offsets).measure(specs).mean_kl.tolist()
            self.journal.write_text(json.dumps(self.known))
        return self.known[key]

    def specs(self, configuration: Configuration, table: SensitivityTable | None = None) -> Any:
        """The storage of every layer."""
        return layer_specs(configuration, table or self.run.table, self.bench.options.quant)

    def reported(self, name: str, configuration: Configuration) -> list[float]:
        """The KL of each sequence of the report split, over small and large offsets."""
        specs = self.specs(configuration)
        parts = [self.kl(name, specs, "report", offsets) for offsets in OFFSETS]
        return [sum(pair) / 2 for pair in zip(*parts, strict=True)]

    def solution(self, budget: str, *, all_transforms: bool = False) -> Configuration:
        """The exact solution of a budget, with the transforms that Fisher prefers or with the best of all."""
        constraint = Budget.parse(budget).constraint(self.run.shape.geometry)
        table = self.full if all_transforms else self.run.table
        return solve(build_space(table, "kl", constraint.shape), constraint)

    def additivity(self) -> list[dict[str, Any]]:
        """Predicted beside measured KL of the exact solutions and of uniforms."""
        rows = []
        named = {budget: self.solution(budget) for budget in self.budgets}
        named |= {f"{budget}, all transforms": self.solution(budget, all_transforms=True) for budget in self.budgets}
        named |= {pair: self.run.uniform(PrecisionPair.parse(pair), transforms=True) for pair in UNIFORMS}
        for name, configuration in named.items():
            here = self.kl(name, self.specs(configuration), "calibrate")
            report = self.reported(name, configuration)
            row = {"name": name, "predicted": predicted_score(configuration), "calibrate": float(np.mean(here))}
            row |= {"report": float(np.mean(report)), "pairs": [str(pair) for pair in pairs_of(configuration)]}
            rows.append(row)
            print(json.dumps(row), flush=True)
        return rows

    def fisher(self) -> list[dict[str, Any]]:
        """What Fisher's choice of a transform costs in isolated KL."""
        rows = []
        for side in SIDES:
            for bits in self.bench.options.quant.widths:
                chosen, best, agree = 0.0, 0.0, 0
                for layer in range(self.full.geometry.num_layers):
                    scores = self.full.of(layer, side, bits)
                    kls = {name: score.kl for name, score in scores.items() if score.kl is not None}
                    preferred = kls[min(kls, key=lambda name: scores[name].fisher)]
                    least = min(kls.values())
                    chosen, best, agree = chosen + preferred, best + least, agree + (preferred == least)
                row = {"side": side, "bits": bits, "agree": agree, "kl_of_choice": chosen, "kl_of_best": best}
                rows.append(row)
                print(json.dumps(row), flush=True)
        return rows

    def wins(self) -> dict[str, Any]:
        """Counts of the transforms with the least isolated KL, of pairs in menus, and of what solutions took."""
        transforms: Counter[str] = Counter()
        without: dict[str, float] = {}
        layers = range(self.full.geometry.num_layers)
        for side in SIDES:
            for bits in self.bench.options.quant.widths:
                places = [
                    {n: s.kl for n, s in self.full.of(layer, side, bits).items() if s.kl is not None}
                    for layer in layers
                ]
                for scores in places:
                    transforms[f"{side}{bits} {min(scores, key=scores.__getitem__)}"] += 1
                total = sum(min(scores.values()) for scores in places)
                for name in places[0]:
                    rest = sum(min(kl for n, kl in scores.items() if n != name) for scores in places)
                    without[f"{side}{bits} {name}"] = rest / total
        constraint = Budget.parse("4bit").constraint(self.run.shape.geometry)
        space = build_space(self.full, "kl", constraint.shape)
        menus = Counter(str(pair) for menu in space.menus for pair in menu.pairs)
        caps = [f"{2 + step / 8}bit" for step in range(0, 49)]
        taken: Counter[str] = Counter()
        for cap in caps:
            taken.update(
                str(choice.pair) for choice in solve(space, Budget.parse(cap).constraint(self.run.shape.geometry))
            )
        result = {
            "transforms": dict(transforms),
            "without": without,
            "menus": dict(menus),
            "taken_2_to_8bit": dict(taken),
        }
        print(json.dumps(result), flush=True)
        return result

    def sequences(self) -> list[dict[str, Any]]:
        """How often the paired interval excludes zero with fewer sequences, and how wide it is."""
        rng, rows = np.random.default_rng(0), []
        for budget in self.budgets:
            winner = self.solution(budget)
            constraint = Budget.parse(budget).constraint(self.run.shape.geometry)
            uniforms = {}
            for name in UNIFORMS:
                configuration = self.run.uniform(PrecisionPair.parse(name), transforms=True)
                if constraint.is_met(pairs_of(configuration)):
                    uniforms[name] = np.array(self.reported(name, configuration))
            name = min(uniforms, key=lambda n: uniforms[n].mean())
            ours, theirs = np.array(self.reported(budget, winner)), uniforms[name]
            difference = ours - theirs
            row: dict[str, Any] = {"budget": budget, "uniform": name, "ours": ours.mean(), "theirs": theirs.mean()}
            row["standard_deviation"] = difference.std(ddof=1)
            row["same"] = bool((difference == 0).all())
            for count in (c for c in COUNTS if c <= len(ours)):
                below = above = 0
                width = []
                for _ in range(SUBSETS):
                    some = rng.permutation(len(ours))[:count]
                    interval = bootstrap_mean(
                        difference[some], np.ones(count, dtype=np.int64), seed=0, num_resamples=400
                    )
                    below, above = below + (interval.high < 0), above + (interval.low > 0)
                    width.append((interval.high - interval.low) / 2)
                row[str(count)] = {
                    "better": below / SUBSETS,
                    "worse": above / SUBSETS,
                    "half_width": float(np.mean(width)),
                }
            rows.append(row)
            print(json.dumps(row), flush=True)
        return rows

    def constants(self, budget: str) -> dict[str, Any]:
        """The KL of a solution with refined mu and lambda, by layers alone and all together."""
        configuration = self.solution(budget)
        table, result = self.run.table, dict[str, Any](budget=budget)
        before = np.array(self.reported(budget, configuration))
        result["before"] = float(before.mean())
        for together in (False, True):
            refined, kept = refined_constants(self.bench, table, configuration, together=together)
            specs = self.specs(configuration, replace(table, constants=refined))
            parts = [self.simulator("report", o).measure(specs).mean_kl.numpy() for o in OFFSETS]
            after = np.mean(parts, axis=0)
            share = after.mean() / before.mean()
            error = (after - share * before).std(ddof=1) / len(after) ** 0.5 / before.mean()
            name = "together" if together else "alone"
            result[name] = {"after": float(after.mean()), "share": float(share), "error": float(error), "kept": kept}
            print(json.dumps({name: result[name]}), flush=True)
        return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budgets", nargs="+", default=["2.5bit", "3bit", "3.5bit", "4bit"])
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--sequences", type=int, nargs=3, default=[4, 12, 24])
    args = parser.parse_args()
    torch.manual_seed(0)
    judged = SearchJudge(args)
    results = {"model": args.model.rstrip("/").split("/")[-1], "sequences": args.sequences}
    results |= {"fisher": judged.fisher(), "wins": judged.wins(), "additivity": judged.additivity()}
    results |= {"report": judged.sequences(), "constants": judged.constants("3bit")}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
