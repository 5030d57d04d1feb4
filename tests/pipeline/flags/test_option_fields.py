"""Options from Python: texts as flags take them, and numbers that a flag's text could be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtuner.errors import OptionError
from kvtuner.pipeline.eval_bench_options import BenchOptions, EvalOptions
from kvtuner.pipeline.local.engine_flags import EngineFlags, SamplingFlags
from kvtuner.pipeline.options import CalibrateOptions, DataOptions, MeasurementOptions, ModelOptions, SearchOptions
from kvtuner.pipeline.planning.plan_options import PlanOptions

READ: list[tuple[type, str, Any, Any]] = [
    (SearchOptions, "time_limit", "10min", 600),
    (SearchOptions, "trials", "7", 7),
    (CalibrateOptions, "workers", "2", 2),
    (MeasurementOptions, "residual_length", "32", 32),
    (MeasurementOptions, "residual_length", "auto", "auto"),
    (ModelOptions, "context_length", "32k", 32_768),
    (DataOptions, "sequence_length", "2k", 2048),
    (DataOptions, "sequences", "4,2,3", (4, 2, 3)),
    (DataOptions, "sequences", 4, (4, 4, 4)),
    (EvalOptions, "lengths", (2048, 128), (128, 2048)),
    (EvalOptions, "lengths", "2k,128", (128, 2048)),
    (EvalOptions, "levels", "recall", ("recall",)),
    (EvalOptions, "lengths", range(128, 256, 64), (128, 192)),
    (EvalOptions, "against", (), ()),
    (PlanOptions, "memory", "2TiB", 2 << 40),
    (PlanOptions, "weights", 1400 << 30, 1400 << 30),
    (BenchOptions, "memory_bandwidth", 8e11, 8e11),
    (BenchOptions, "kv_memory", "4gib", 4 << 30),
    (EngineFlags, "kv_memory", 5e9, 5_000_000_000),
    (SamplingFlags, "temperature", 0, 0),
    (SearchOptions, "trials", np.int64(7), 7),
]
REFUSED: list[tuple[type, str, Any, str]] = [
    (SearchOptions, "trials", 0.5, "trials must be a whole number, not '0.5'"),
    (SearchOptions, "trials", True, "trials must be a whole number, not 'True'"),
    (CalibrateOptions, "workers", 2.5, "workers must be a whole number, not '2.5'"),
    (CalibrateOptions, "workers", 0, "workers must be at least 1, not 0"),
    (MeasurementOptions, "seed", 1.5, "seed must be a whole number, not '1.5'"),
    (MeasurementOptions, "symmetric", "false", "symmetric must be True or False, not 'false'"),
    (ModelOptions, "context_length", 100.5, "context_length must be a whole number of tokens, .* not '100.5'"),
    (DataOptions, "sequences", (16, 8.5, 16), "sequences must be a whole number, not '8.5'"),
    (DataOptions, "sequences", (16, 8), "sequences must be one count or three"),
    (EvalOptions, "levels", ("recal",), "levels 'recal' is none of likelihood, recall"),
    (EvalOptions, "num_fewshot", -1, "num_fewshot must be at least 0, not -1"),
    (BenchOptions, "memory_bandwidth", "fast", "memory_bandwidth must be a number, not 'fast'"),
    (SamplingFlags, "temperature", float("nan"), "temperature must be a number, not 'nan'"),
]
NEEDED: dict[type, dict[str, Any]] = {
    SearchOptions: {"budget": ("4bit",)},
    EvalOptions: {"profile": "p.json"},
    BenchOptions: {"profile": "p.json"},
    PlanOptions: {"model": "demo", "gpu": "H100"},
}


@pytest.mark.parametrize(("kind", "name", "value", "expected"), READ)
def test_a_value_that_a_flag_could_be_is_what_the_flag_says(kind: type, name: str, value: Any, expected: Any) -> None:
    found = getattr(kind(**NEEDED.get(kind, {}), **{name: value}), name)
    assert found == expected
    assert isinstance(found, int) == isinstance(expected, int)


@pytest.mark.parametrize(("kind", "name", "value", "message"), REFUSED)
def test_a_value_that_no_flag_could_be_is_refused_by_its_name(kind: type, name: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        kind(**NEEDED.get(kind, {}), **{name: value})


def test_a_window_given_as_text_is_a_window() -> None:
    assert MeasurementOptions(residual_length="32").window.residual_length == 32  # type: ignore[arg-type]  # as a flag's
