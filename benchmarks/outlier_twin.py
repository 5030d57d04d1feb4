"""A 4-bit search on a model and on its twin with outlier key channels, where plain 4-bit keys fail.

    python benchmarks/outlier_twin.py --model demo --out runs/twin

The twin (`kvtuner.calibration.demo.outliers`) is the same function. `ratio` is the searched KL of the twin over that
of the model; both are measured on the report split, small and large position offsets pooled. Resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json

import optuna
from search_quality import CalibratedModel, add_arguments, prepare

from kvtuner.calibration.demo.outliers import make_twin
from kvtuner.precision import PrecisionPair


def row(model: CalibratedModel, args: argparse.Namespace) -> dict[str, float]:
    """The KL of uniform K4V4 without and with the best transforms, and of the search at its 4 bits."""
    space, constraint = model.problem("4bit")
    kl = {}
    for name, transforms in (("K4V4 plain", False), ("K4V4", True)):
        configuration = model.run.uniform(PrecisionPair(4, 4), transforms=transforms)
        kl[name] = model.report_kl(configuration, name, transforms=transforms)
    settings = {"sampler": "nsga2", "guidance": "surrogate", "num_trials": args.trials, "seed": args.seed}
    warm = model.starts(space, constraint, args.trials)
    kl["searched"], _ = model.searched(space, constraint, warm, **settings)
    return kl


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    twin = args.out / "twin-model"
    if not twin.exists():
        make_twin(args.model, twin)
    rows = {
        name: row(prepare(source, args.out / name, args), args)
        for name, source in (("model", args.model), ("twin", str(twin)))
    }
    print(json.dumps({**rows, "ratio": rows["twin"]["searched"] / rows["model"]["searched"]}, indent=2))


if __name__ == "__main__":
    main()
