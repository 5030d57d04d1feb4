"""KL of searches on min-max and fitted grids, with 3 bits, short words and an exact window, at equal stored bytes.

    python benchmarks/search_variants.py --models demo twin --out runs/variants --json F.json --markdown F.md

Goal: of min-max grids of 2, 4 and 8 bits, fitted ones have at most .55 of the KL, and with 32 exact tokens at most .4;
the outlier twin has at most 1.05 of the model's.

Every variant is a search of `search_quality.py` with other measurement flags, in a folder of its own. The copies of a
window count in a request of `--context` tokens. Beside each search stand uniforms with the same grids, transforms and
window, in as many stored bytes. A model is a name that `kvtuner search` knows, `twin` for the demo
model's with outlier key channels, or NAME=FOLDER. A stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import optuna
from recipes.measurements import PLAIN
from search_quality import REFINED, add_arguments, compare, prepare, uniform_text

from kvtuner.calibration.demo.outliers import make_twin
from kvtuner.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.pipeline.options import MeasurementOptions

REFERENCE_VARIANT: Final = "min-max"


FITTED: Final = replace(PLAIN, fit="least_squares")
THREE_BITS: Final = replace(FITTED, three_bits=True)
CHOSEN_WORDS: Final = replace(THREE_BITS, word_bits="auto")
VARIANTS: Final[dict[str, MeasurementOptions]] = {
    REFERENCE_VARIANT: PLAIN,
    "fitted": FITTED,
    "fitted, 3 bits": THREE_BITS,
    "fitted, 3 bits, words by KL": CHOSEN_WORDS,
    "fitted, 3 bits, last 32": replace(THREE_BITS, residual_length=32),
    "fitted, 3 bits, words by KL, last 32": replace(CHOSEN_WORDS, residual_length=32),
}
"""The measurements to compare by name: min-max grids first, the defaults of a search last."""


def source_of(model: str, out: Path) -> tuple[str, str]:
    """The name of a model and its source."""
    name, _, folder = model.partition("=")
    if name != "twin" or folder:
        return name, folder or name
    twin = out / "twin-model"
    if not twin.exists():
        make_twin("demo", twin)
    return name, str(twin)


def folder_of(out: Path, model: str, variant: str) -> Path:
    """The folder of a model's variant."""
    return out / model / variant.replace(", ", "-").replace(" ", "-")


def searches_of(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """All variants of one model, as JSON values."""
    name, source = source_of(model, args.out)
    found = []
    for variant, measurement in VARIANTS.items():
        if variant not in args.variants:
            continue
        before = processor_seconds()
        calibrated = prepare(source, folder_of(args.out, name, variant), args, measurement)
        rows = [compare(calibrated, budget, args) for budget in args.budgets]
        found.append({"variant": variant, "rows": rows})
        print(json.dumps({"model": name, **found[-1], "seconds": processor_seconds() - before}), flush=True)
    return {"model": name, "variants": found}


def processor_seconds() -> float:
    """The processor time that this process has taken."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def refined_kl(row: Mapping[str, Any]) -> float:
    """The KL of the refined search with the first seed."""
    kl: float = row[REFINED]["kl"][0]
    return kl


def kl_by_budget(variants: Sequence[Mapping[str, Any]], variant: str) -> dict[str, float]:
    """The refined KL of one variant by budget; empty where it was not measured."""
    return {row["budget"]: refined_kl(row) for item in variants if item["variant"] == variant for row in item["rows"]}


def markdown(result: Mapping[str, Any]) -> str:
    """The page: a table for every model, and the twin beside its model."""
    lines = ["# Searches on fitted grids", "", *result["notes"], ""]
    models = {item["model"]: item["variants"] for item in result["models"]}
    for name, variants in models.items():
        lines += [f"## {name}", "", *_search_table(variants).markdown(), ""]
    if {"demo", "twin"} <= models.keys():
        lines += ["## The twin's KL as a share of the demo model's", "", *_twin_table(models).markdown(), ""]
    return "\n".join(lines)


def _search_table(variants: Sequence[Mapping[str, Any]]) -> Table:
    cells = []
    reference = kl_by_budget(variants, REFERENCE_VARIANT)
    for item in variants:
        for row in item["rows"]:
            kl = refined_kl(row)
            mean, low, high = row["less_uniform+t"]
            cells.append(
                [
                    item["variant"],
                    row["budget"],
                    f"{row['stored_bits']:.3f}",
                    f"{row['exact']:.3g}",
                    f"{kl:.3g}",
                    f"{kl / reference[row['budget']]:.2f}" if reference else "-",
                    uniform_text(row, "uniform"),
                    f"{row['uniform+t']:.3g} ({row['uniform+t_name']}, {row['uniform+t_stored_bits']:.2f})",
                    f"{kl / row['uniforms_in_as_many']:.2f}",
                    "even" if low <= 0 <= high else "search" if mean < 0 else "UNIFORM",
                ]
            )
    header = ["grids", "budget", "stored bits", "exact", "refined", "of min-max"]
    header += ["best plain uniform", "best uniform alike", "of uniforms in as many bits", "lower"]
    return Table(header, cells)


def _twin_table(models: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    cells = []
    for item in models["twin"]:
        model, twin = (kl_by_budget(models[name], item["variant"]) for name in ("demo", "twin"))
        cells.append([item["variant"], *(f"{twin[budget] / model[budget]:.2f}" for budget in twin if budget in model)])
    return Table(["grids", *(row["budget"] for row in models["twin"][0]["rows"])], cells)


def notes(args: argparse.Namespace) -> list[str]:
    """What the figures are of."""
    calibrate, select, report = args.sequences
    return [
        f"KL in nats per token on {report} unseen sequences of {args.sequence_length} tokens, small and large positions"
        f" pooled; calibrated on {calibrate} and refined in {args.trials} trials on {select} sequences, seed"
        f" {args.seeds[0]}. Budgets are of payload; `stored bits` hold scales, padding, and the copies of the window in"
        f" a request of {args.context} tokens, which rows have less: nothing of one budget stores more. The best"
        " uniform alike is the best inside the budget with the same grids, transforms and window; its own stored bits"
        " stand beside it. `lower` compares the two: where the 95 % interval of the paired difference excludes zero."
        " Uniforms use up few budgets, so the share is of the KL that uniforms alike would have in as many bits as the"
        " search, interpolated between two of them.",
    ]


def write(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Write the files that were asked for."""
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(markdown(result), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(VARIANTS)
    add_arguments(flags)
    flags.add_argument("--models", nargs="+", default=["demo"], help="demo, twin, or NAME=FOLDER")
    flags.add_argument("--variants", nargs="+", choices=names, default=names)
    flags.add_argument("--budgets", nargs="+", default=["2.5bit", "3bit", "3.5bit", "4bit"])
    flags.add_argument("--markdown", type=Path)
    flags.set_defaults(context=4096, methods=["exact", REFINED], seeds=[0])
    args = flags.parse_args(argv)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    models = []
    for model in args.models:
        models.append(searches_of(model, args))
        result = {"notes": notes(args), "models": models}
        write(args, result)
    print(markdown(result))


if __name__ == "__main__":
    main()
