"""A 4-bit search on a model and on its twin with outlier key channels, where plain 4-bit keys fail.

    python benchmarks/outlier_twin.py --model demo --out runs/twin

The twin (`kvtuner.calibration.demo.outliers`) is the same function. `ratio` is the searched KL of the twin over that
of the model, at most 1.05 by the goal; both are measured on the report split, small and large position offsets pooled.
Resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import optuna
from search_quality import CalibratedModel, add_arguments, add_measurement, prepare, settings_text

from kvtuner.calibration.demo.outliers import make_twin
from kvtuner.pipeline.flags.option_fields import options_from
from kvtuner.pipeline.options import MeasurementOptions
from kvtuner.precision import PrecisionPair

if TYPE_CHECKING:
    from collections.abc import Sequence


def row(model: CalibratedModel, args: argparse.Namespace) -> dict[str, float]:
    """The KL of uniform K4V4 without and with the best transforms, and of the search at its 4 bits."""
    space, constraint = model.problem("4bit")
    kl = {}
    for name, transforms in (("K4V4 plain", False), ("K4V4", True)):
        configuration = model.run.uniform(PrecisionPair(4, 4), transforms=transforms)
        kl[name] = model.report_kl(configuration, transforms=transforms)
    settings: dict[str, Any] = {
        "sampler": "nsga2",
        "guidance": "surrogate",
        "num_trials": args.trials,
        "seed": args.seed,
    }
    warm = model.starts(space, constraint, args.trials)
    best, _ = model.searched(space, constraint, warm, **settings)
    assert best is not None, "warm starts keep the budget"
    return {**kl, "searched": model.report_kl(best)}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    add_measurement(parser)
    args = parser.parse_args(argv)
    measurement = options_from(MeasurementOptions, vars(args))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    twin = args.out / "twin-model"
    if not twin.exists():
        make_twin(args.model, twin)
    rows = {
        name: row(prepare(source, args.out / name, args, measurement), args)
        for name, source in (("model", args.model), ("twin", str(twin)))
    }
    result = {"settings": settings_text(args), **rows, "ratio": rows["twin"]["searched"] / rows["model"]["searched"]}
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
