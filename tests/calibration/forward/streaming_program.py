"""Measures a model, streamed or not, within a memory cgroup, and prints all figures as JSON.

    python streaming_program.py FOLDER {streamed,whole} [CGROUP.PROCS]

What was in memory before, such as torch, does not count: the process joins the cgroup after it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from kvtuner.calibration.batches import Batch
from kvtuner.calibration.candidate_pass import CandidateMeasurement
from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.forward.simulator import LayerSpec, Simulator
from kvtuner.calibration.forward.streamed_layers import streamed_layers_of
from kvtuner.calibration.isolated_kl import measure_isolated
from kvtuner.calibration.model_loading import ModelSource, auto_class_of, load_model
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.calibration.sensitivity import Candidate
from kvtuner.calibration.transform_statistics import measure_constants
from kvtuner.quant import QuantSpec
from kvtuner.run_folder import RunFolder

TOKENS, SPLIT = 24, 8


def main() -> None:
    """Measure statistics, candidates, isolated KL and the KL of a uniform configuration."""
    folder, loading, *procs = sys.argv[1:]
    config = AutoConfig.from_pretrained(folder)
    importlib.import_module("accelerate.big_modeling")
    with torch.device("meta"):  # imports the model's code
        auto_class_of(config, folder).from_config(config)
    AutoTokenizer.from_pretrained(folder)
    if procs:
        Path(procs[0]).write_text(str(os.getpid()), encoding="ascii")
    loaded = load_model(ModelSource(folder, device="cpu", stream=loading == "streamed"))
    chain = DecoderChain(loaded.model, loaded.shape.cache)
    plan, options, ids = ReadPlan("decode", SPLIT), QuantizationOptions(), chain.geometry.ids
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, chain.vocab_size, (1, TOKENS), generator=generator) for _ in range(2)]
    batches = [Batch(number, some, torch.arange(TOKENS).unsqueeze(0)) for number, some in enumerate(tokens)]
    constants = measure_constants(chain, batches)
    measurement = CandidateMeasurement(chain, constants, plan, options, num_draws=2, seed=0)
    measurement.run(batches)
    places = [(ids[0], "k"), (ids[len(ids) // 2], "v"), (ids[-1], "k"), (ids[-1], "v")]
    candidates = [Candidate(layer, side, 2, "none") for layer, side in places]
    with tempfile.TemporaryDirectory() as run:
        isolated = measure_isolated(
            chain, batches, candidates, constants, plan=plan, options=options, folder=RunFolder(run), identity="any"
        )
    specs = {layer: LayerSpec(QuantSpec(4), QuantSpec(2)) for layer in chain.geometry.ids}
    streamed = streamed_layers_of(loaded.model)
    figures = {
        "weights": loaded.weights_sha256,
        "fisher": {str(candidate): scores.fisher for candidate, scores in measurement.scores().items()},
        "e_o": {str(candidate): scores.e_o for candidate, scores in measurement.scores().items()},
        "isolated": {str(dataclasses.astuple(candidate)): kl for candidate, kl in isolated.items()},
        "uniform": Simulator(chain, batches, plan).kl(specs),
    }
    loads = None if streamed is None else streamed.num_loads
    sys.stdout.write(json.dumps({"figures": figures, "loads": loads}) + "\n")


if __name__ == "__main__":
    main()
