"""Recall of the demo model's tables at 2 bits: min-max and fitted grids, an exact window, and a searched profile.

    python benchmarks/recall_at_two_bits.py --out runs/variants --json F.json --markdown F.md

Goal: above 90 % at the length where min-max grids of K2V2 fall to 70 %.

Every scheme is a profile that `kvtuner eval --levels recall` asks the same questions, each after a table that was
prefilled exactly and is read as it is stored. K2V2 has the best transforms of its grids, measured without a window. The
searched profile has as many stored bits as 2.5bit without a window at `--context` tokens. Calibrations and answers
stand in `--out`, which may be that of `search_variants.py`; a stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import optuna
from search_quality import SEARCHES, CalibratedModel, add_arguments, prepare
from search_variants import VARIANTS, folder_of

from kvtuner.exported_configs.profile.build import AskedBudget, build_profile, write_profile
from kvtuner.pipeline.eval_bench_options import EvalOptions
from kvtuner.pipeline.evaluate import run_evaluation
from kvtuner.pipeline.options import ModelOptions
from kvtuner.pipeline.stages.search_output import chosen_layers
from kvtuner.precision import NO_WINDOW, ExactWindow, PrecisionPair
from kvtuner.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.search_spaces.space import Configuration

WINDOW: Final = ExactWindow(residual_length=32)
SEARCHED_BUDGET: Final = "2.5bit"
REFINED_SEARCH: Final = "exact+refined"


@dataclass(frozen=True, slots=True)
class RecallScheme:
    """A scheme by its name: the variant of `search_variants.py` that measured it, its window, searched or K2V2."""

    name: str
    variant: str
    window: ExactWindow = NO_WINDOW
    is_searched: bool = False


SCHEMES: Final = (
    RecallScheme("K2V2, min-max", "min-max"),
    RecallScheme("K2V2, min-max, last 32", "min-max", WINDOW),
    RecallScheme("K2V2, fitted", "fitted"),
    RecallScheme("K2V2, fitted, last 32", "fitted", WINDOW),
    RecallScheme("K2V2, fitted, last 32 and first 4", "fitted", ExactWindow(residual_length=32, sinks=4)),
    RecallScheme("2.5bit search, last 32", "fitted, 3 bits, last 32", WINDOW, is_searched=True),
)


def configuration_of(scheme: RecallScheme, model: CalibratedModel, args: argparse.Namespace) -> Configuration:
    """The choice of every layer."""
    if not scheme.is_searched:
        return model.run.uniform(PrecisionPair(2, 2), transforms=True)
    space, constraint = model.problem(SEARCHED_BUDGET)
    sampler, guidance = SEARCHES[REFINED_SEARCH]
    settings: dict[str, Any] = {"sampler": sampler, "guidance": guidance, "num_trials": args.trials, "seed": 0}
    best, _ = model.searched(space, constraint, model.starts(space, constraint, args.trials), **settings)
    assert best is not None, "warm starts keep the budget"
    return best


def profile_of_scheme(scheme: RecallScheme, model: CalibratedModel, configuration: Configuration) -> Profile:
    """The profile that stores a configuration with the scheme's window."""
    run = model.run
    geometry, quant, loaded = run.shape.geometry, run.bench.options.quant, run.bench.loaded
    return build_profile(
        geometry=geometry,
        layers=chosen_layers(run.table, configuration),
        k_layout=quant.k_layout,
        v_layout=quant.v_layout,
        symmetric=quant.symmetric,
        fit=quant.fit,
        window=scheme.window,
        model=run.shape.identity(loaded.source, loaded.dtype_name, loaded.tokenizer),
        budget=AskedBudget(scheme.name),
    )


def recall_of(scheme: RecallScheme, args: argparse.Namespace) -> dict[str, Any]:
    """The answers of a scheme and of the unquantized model, by length."""
    model = prepare(args.model, folder_of(args.out, args.model, scheme.variant), args, VARIANTS[scheme.variant])
    configuration = configuration_of(scheme, model, args)
    profile = profile_of_scheme(scheme, model, configuration)
    folder = args.out / "recall"
    path = folder / f"{scheme.name.replace(', ', '-').replace(' ', '-')}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_profile(path, profile)
    options = EvalOptions(
        profile=str(path),
        model=ModelOptions(model=args.model),
        levels=("recall",),
        lengths=tuple(args.lengths),
        problems=args.problems,
        questions=args.questions,
        against=(),
        out=str(folder / "answers"),
    )
    cells = run_evaluation(options).evaluation.cells
    lengths = [
        {
            "tokens": cell.num_tokens,
            **{result.scheme: [result.mean, result.low, result.high] for result in cell.results},
        }
        for cell in cells
    ]
    return {"scheme": scheme.name, "stored_bits": float(profile.budget.effective_bits), "lengths": lengths}


def markdown(result: Mapping[str, Any]) -> str:
    """The page: the share of right answers of every scheme by length."""
    tokens = [cell["tokens"] for cell in result["schemes"][0]["lengths"]]
    rows = [["unquantized", "-", *(_share(cell["bf16"]) for cell in result["schemes"][0]["lengths"])]]
    for scheme in result["schemes"]:
        shares = (_share(cell["profile"]) for cell in scheme["lengths"])
        rows.append([scheme["scheme"], f"{scheme['stored_bits']:.2f}", *shares])
    header = ["scheme", "stored bits of rows", *(f"{length} tokens" for length in tokens)]
    return "\n".join(["# Recall at 2 bits", "", *result["notes"], "", *Table(header, rows).markdown(), ""])


def _share(figures: Sequence[float]) -> str:
    mean, low, high = (100 * figure for figure in figures)
    return f"{mean:.1f} % ({low:.1f} to {high:.1f})"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--schemes", nargs="+", choices=[s.name for s in SCHEMES], default=[s.name for s in SCHEMES])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 384, 512])
    parser.add_argument("--problems", type=int, default=30, help="tables of every length")
    parser.add_argument("--questions", type=int, default=6, help="questions to every table")
    parser.add_argument("--markdown", type=Path)
    parser.set_defaults(context=4096)
    args = parser.parse_args(argv)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    schemes = []
    for scheme in SCHEMES:
        if scheme.name in args.schemes:
            schemes.append(recall_of(scheme, args))
            print(json.dumps(schemes[-1]), flush=True)
    note = (
        f"Share of right answers and its 95 % interval: {args.problems} tables of key:value lines,"
        f" {args.questions} questions to each, greedy, on the demo model. K2V2 has the best transforms of its grids."
    )
    result = {"notes": [note], "schemes": schemes}
    print(markdown(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(markdown(result), encoding="utf-8")


if __name__ == "__main__":
    main()
