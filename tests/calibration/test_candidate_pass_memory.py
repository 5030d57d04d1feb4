"""The memory of the candidate pass: one layer, and what a batch keeps of the others."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvtuner.calibration.candidate_pass import CandidateMeasurement
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.calibration.transform_statistics import measure_constants

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import RandomBatches

    from kvtuner.calibration.forward.chain import DecoderChain


@pytest.mark.slow
def test_memory_grows_with_depth_by_the_residual_stream_alone(
    chain_of: Callable[..., DecoderChain],
    random_batches: RandomBatches,
    peak_bytes: Callable[[Callable[[], object]], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A wide residual stream beside one narrow head and few candidates: what is kept per layer, or from one batch to
    # the next, cannot hide behind the work on a layer.
    few: dict[str, tuple[str, ...]] = {"k": ("none", "hadamard"), "v": ("none",)}
    monkeypatch.setattr(QuantizationOptions, "transform_names", lambda _, side: few[side])
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    tokens, width, peaks = 32, 1024, {}
    for depth in (2, 12):
        for num_sequences in (2, 6):
            chain = chain_of("llama-gqa", num_hidden_layers=depth, hidden_size=width, intermediate_size=16, **heads)
            batches = random_batches(num_sequences, tokens, batch_size=2)
            constants = measure_constants(chain, batches)
            measurement = CandidateMeasurement(chain, constants, ReadPlan("decode", 5), QuantizationOptions(), 1, 4)
            peaks[depth, num_sequences] = peak_bytes(partial(measurement.run, batches))
    residual = 2 * tokens * width * 4
    assert peaks[12, 2] > 12 * residual
    assert peaks[2, 6] <= 1.01 * peaks[2, 2]
    assert peaks[12, 6] <= 1.01 * peaks[12, 2]
    assert peaks[12, 2] - peaks[2, 2] <= 10 * 1.01 * residual
