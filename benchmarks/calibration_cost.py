"""The cost of the pass over all candidates in units of a plain forward and backward of the same model and tokens.

    python benchmarks/calibration_cost.py --model demo --tokens 512 --draws 1 4

The goal is at most R + 2.5 units for R Fisher draws; the first pass, which gathers the transforms' statistics, is timed
beside it. Runs alternate, so that a drift of the machine touches both;
processor time is compared, since wall time on a shared machine is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING

import torch

from kvtuner.calibration.batches import batches
from kvtuner.calibration.candidate_pass import CandidateMeasurement
from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.model_loading import ModelSource, load_model
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.calibration.transform_statistics import measure_constants

if TYPE_CHECKING:
    from collections.abc import Callable


def seconds(work: Callable[..., object], *args: object) -> float:
    """The processor seconds of one call."""
    start = time.process_time()
    work(*args)
    return time.process_time() - start


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    loaded = load_model(ModelSource(args.model))
    chain = DecoderChain(loaded.model, loaded.shape.geometry)
    ids = torch.randint(2, loaded.model.config.vocab_size, (1, args.tokens), generator=torch.Generator().manual_seed(0))
    batch = list(batches(ids, loaded.shape.context_length, offsets="random", seed=0))
    constants = measure_constants(chain, batch)
    plan = ReadPlan.of("decode", args.tokens)

    def plain() -> None:
        loaded.model.requires_grad_(True)
        logits = loaded.model(batch[0].input_ids, position_ids=batch[0].position_ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
        loaded.model.zero_grad(set_to_none=True)
        loaded.model.requires_grad_(False)

    def candidates(draws: int) -> None:
        CandidateMeasurement(chain, constants, plan, QuantizationOptions(), draws, 0).run(batch)

    for draws in args.draws:
        units, firsts = [], []
        for _ in range(args.repeats + 1):
            unit = seconds(plain)
            units.append(seconds(candidates, draws) / unit)
            firsts.append(seconds(measure_constants, chain, batch) / unit)
        del units[0], firsts[0]  # of a run that warms up
        figures = {"units": statistics.median(units), "goal": draws + 2.5, "min": min(units), "max": max(units)}
        figures["statistics"] = statistics.median(firsts)
        print(json.dumps({"draws": draws, **{name: round(figure, 2) for name, figure in figures.items()}}))


if __name__ == "__main__":
    main()
