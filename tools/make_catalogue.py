"""Make the catalogue's profiles of the demo model and of its twin with outlier key channels, with their evaluations.

    make catalogue

A search of each model for each budget, in a run folder of its own; an evaluation of each profile; and the index. The
same profiles wherever it runs: `tests/cli/test_catalogue_made_again.py` makes them again and compares.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner.calibration.demo.outliers import make_twin
from kvtuner.cli import main as kvtuner
from kvtuner.exported_configs.profile.evaluation_record import evaluation_files
from kvtuner.exported_configs.sharing.catalogue import FOLDER
from tools import make_catalogue_index

if TYPE_CHECKING:
    from collections.abc import Sequence

BUDGETS: Final = ("3bit", "4bit", "6bit")
TWIN: Final = "demo-outliers"
AS_THE_DEMO: Final = ("--sequence-length", "512", "--sequences", "16,12,12")
"""The flags that `--model demo` stands for: the model was trained on 512 tokens, and its twin is the same function."""


def make(work: Path, name: str) -> dict[str, Path]:
    """Search and evaluate one model, by its name in the catalogue; returns the files by their names there."""
    model, flags = ("demo", ()) if name == "demo" else (str(twin(work)), AS_THE_DEMO)
    files = {}
    for budget in BUDGETS:
        out = work / f"catalogue-{name}-{budget}"
        shutil.rmtree(out, ignore_errors=True)
        profile = out / "profile.json"
        _run("search", "--model", model, "--budget", budget, *flags, "--no-report", "--out", str(out))
        _run("eval", str(profile), "--model", model, "--levels", "likelihood,recall", "--out", str(out / "evaluation"))
        for file in (profile, *evaluation_files(profile)):
            files[file.name.replace("profile", f"{name}-{budget}", 1)] = file
    return files


def twin(work: Path) -> Path:
    """Make the twin; returns its folder."""
    folder = work / TWIN
    shutil.rmtree(folder, ignore_errors=True)
    make_twin("demo", folder)
    return folder


def _run(*arguments: str) -> None:
    if status := kvtuner(arguments):
        raise SystemExit(status)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs"), help="folder of run folders and of the twin")
    parser.add_argument("--models", nargs="+", choices=("demo", TWIN), default=("demo", TWIN), help="both, by default")
    args = parser.parse_args(argv)
    for name in args.models:
        files = make(args.work, name)
        for old in FOLDER.glob(f"{name}-[0-9]*"):
            old.unlink()
        for kept, file in files.items():
            shutil.copy(file, FOLDER / kept)
    make_catalogue_index.main()


if __name__ == "__main__":
    main()
