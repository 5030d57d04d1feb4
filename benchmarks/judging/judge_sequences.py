"""What a calibration's sequences are worth beside forwards of single candidates on them.

    python benchmarks/judging/judge_sequences.py --model demo --out runs/judged-sequences --json sequences.json

All sequences have their Fisher scores and the KL of every candidate that could be chosen. Calibrations are draws of
some of the sequences; the solution of each for several budgets is judged by the KL of all sequences, as a multiple of
the least that a solution has. `worse layer` is the same where one layer at a time has 6 times the KL at 2 bits and
twice at 3, which its Fisher scores do not tell. The table is in docs/method.md. Resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtuner.calibration.isolated.candidates import (
    MeasuredScore,
    isolated_candidates,
    isolated_sequences,
    with_isolated_kl,
)
from kvtuner.calibration.isolated.forwards import JOURNAL, measure_isolated
from kvtuner.calibration.sensitivity import Candidate
from kvtuner.calibration.shared_passes import CANDIDATES
from kvtuner.pipeline.options import CalibrateOptions, DataOptions, MeasurementOptions, ModelOptions
from kvtuner.pipeline.stages.search_run import checked_shape, measure_sensitivity
from kvtuner.precision import WIDEST_PACKED_BITS
from kvtuner.run_folder import RunFolder, sha256_of
from kvtuner.search_spaces.budget import Budget
from kvtuner.search_spaces.space import build_space
from kvtuner.tuner.exact_solver import solve

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtuner.calibration.sensitivity import SensitivityTable

WORSE: Final = {2: 6.0, 3: 2.0}


class SequenceJudge:
    """The scores of every sequence, and the solutions of some of them.

    Attributes:
        kl: KL of the candidates in `candidates`, float64 [candidates, sequences], nats per token.
        fisher: The Fisher scores, likewise.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        options = CalibrateOptions(
            model=ModelOptions(model=args.model),
            data=DataOptions(sequence_length=args.sequence_length, sequences=(args.sequences, 1, 2)),
            measurement=MeasurementOptions(word_bits="32"),
        )
        folder = RunFolder(args.out)
        phases, self.table = measure_sensitivity(options, checked_shape(options), folder, phase="calibration", ahead=())
        self.budgets = [Budget.parse(text) for text in args.budgets]
        self.candidates = self._measure_all(phases.bench, folder)
        batches = range(args.sequences)
        scored = args.sequence_length - phases.bench.plan.split
        kls, fishers = {}, {}
        for record in folder.records(JOURNAL):
            place = Candidate(record["layer"], record["side"], record["bits"], record["transform"])
            kls[place, record["batch"]] = record["kl_sum"] / scored
        for record in folder.records(CANDIDATES):
            for *place, errors in record["sums"]:
                fishers[Candidate(*place), record["batch"]] = errors["fisher"]
        self.kl = np.array([[kls[candidate, batch] for batch in batches] for candidate in self.candidates])
        self.fisher = np.array([[fishers[candidate, batch] for batch in batches] for candidate in self.candidates])

    def _measure_all(self, bench: Any, folder: RunFolder) -> list[Candidate]:
        """Measure the KL of what a search can choose: at the narrowest width what it measures, above Fisher's first."""
        first = [
            min(
                (Candidate(layer, side, bits, name) for name in self.table.of(layer, side, bits)),
                key=lambda candidate: self.table.scores[candidate].fisher,
            )
            for layer in self.table.geometry.ids
            for side in self.table.geometry.sides
            for bits in self.table.widths[1:]
            if bits < WIDEST_PACKED_BITS
        ]
        candidates = [*isolated_candidates(self.table.scores), *first]
        measure_isolated(
            bench.chain,
            bench.batches("calibrate"),
            candidates,
            self.table.constants,
            plan=bench.plan,
            options=bench.options.quant,
            folder=folder,
            identity=sha256_of(self.table.identity),
        )
        return candidates

    def of_kl(self, kl: NDArray[np.float64]) -> SensitivityTable:
        """The table with that KL of the candidates; wider ones keep theirs."""
        measured = dict(zip(self.candidates, kl.tolist(), strict=True))
        scores = {c: replace(s, kl=measured.get(c, s.kl)) for c, s in self.table.scores.items()}
        return replace(self.table, scores=scores)

    def corrected(self, chosen: NDArray[np.intp], kl: NDArray[np.float64]) -> NDArray[np.float64]:
        """What a search makes of some sequences: their Fisher scores, corrected by the KL of the first of them."""
        most = isolated_sequences(self.table.geometry.num_layers, len(chosen))
        fisher = self.fisher[:, chosen].mean(axis=1)
        narrowest = min(self.table.widths)
        measured = {
            c: MeasuredScore(float(kl[i, chosen[:most]].mean()), float(self.fisher[i, chosen[:most]].mean()), most)
            for i, c in enumerate(self.candidates)
            if c.bits == narrowest
        }
        scores = {c: replace(self.table.scores[c], fisher=f) for c, f in zip(self.candidates, fisher, strict=True)}
        filled = with_isolated_kl(scores, measured)
        return np.array([filled[c].kl for c in self.candidates])

    def total(self, estimated: NDArray[np.float64], kl: NDArray[np.float64], budget: Budget) -> float:
        """The KL on all sequences of the solution that an estimate leads to."""
        constraint = budget.constraint(self.table.geometry)
        true: dict[Candidate, float] = dict(zip(self.candidates, kl.mean(axis=1).tolist(), strict=True))
        solution = solve(build_space(self.of_kl(estimated), "kl", constraint.shape), constraint)
        kept: list[Candidate] = []
        for layer, choice in zip(self.table.geometry.ids, solution, strict=True):
            kept.append(Candidate(layer, "k", choice.pair.k_bits, choice.k_transform))
            kept.append(Candidate(layer, "v", choice.pair.v_bits, choice.v_transform))
        return sum(true.get(candidate, 0.0) for candidate in kept)

    def judge(self, *, draws: int, with_worse_layer: bool) -> dict[str, float]:
        """The KL of each kind of calibration beside the least, the mean over draws and budgets."""
        generator = np.random.default_rng(0)
        layers = np.array([candidate.layer for candidate in self.candidates])
        factors = np.array([WORSE.get(candidate.bits, 1.0) for candidate in self.candidates])
        ratios: dict[str, list[float]] = {}
        for draw in range(draws):
            chosen = generator.choice(self.kl.shape[1], 16, replace=False)
            worse = self.table.geometry.ids[draw % self.table.geometry.num_layers]
            kl = self.kl * np.where(with_worse_layer & (layers == worse), factors, 1.0)[:, None]
            estimates = {
                "KL, 8 sequences": kl[:, chosen[:8]].mean(axis=1),
                "Fisher, 16 sequences": self.fisher[:, chosen].mean(axis=1),
                "corrected, 16 sequences": self.corrected(chosen, kl),
                "KL, 16 sequences": kl[:, chosen].mean(axis=1),
            }
            for budget in self.budgets:
                least = self.total(kl.mean(axis=1), kl, budget)
                for name, estimated in estimates.items():
                    ratios.setdefault(name, []).append(self.total(estimated, kl, budget) / least)
        return {name: float(np.mean(values)) for name, values in ratios.items()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budgets", nargs="+", default=["2.25bit", "2.5bit", "3bit", "3.5bit", "4bit", "5bit"])
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--draws", type=int, default=40)
    args = parser.parse_args()
    judged = SequenceJudge(args)
    results: dict[str, Any] = {"model": args.model.rstrip("/").split("/")[-1], "sequences": args.sequences}
    for name, with_worse_layer in (("as measured", False), ("worse layer", True)):
        results[name] = judged.judge(draws=args.draws, with_worse_layer=with_worse_layer)
        print(json.dumps({name: results[name]}), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
