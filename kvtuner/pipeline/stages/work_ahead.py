"""The forward passes that a search or a calibration has ahead, phase by phase, and how many of them are done.

Knows no weights: the work is counted by the configuration alone.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kvtuner.calibration.auto_settings.window_lengths import lengths_for
from kvtuner.calibration.forward.streamed_layers import SEQUENCES_AT_ONCE
from kvtuner.calibration.isolated.candidates import MEASURED_TRANSFORMS, isolated_sequences, stages
from kvtuner.evaluation.validation import COMPARED_PAIRS
from kvtuner.pipeline.options import CalibrateOptions, SearchOptions
from kvtuner.pipeline.sources import corpus_source
from kvtuner.pipeline.stages.scale_words import competing_layouts
from kvtuner.progress.bar import ProgressBar
from kvtuner.tuner.objective import RACE
from kvtuner.tuner.uniform_table import FIRST_PART

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.pipeline.options import MeasurementOptions
    from kvtuner.pipeline.stages.search_targets import SearchTarget

REFRESH_S: Final = 1.0
_CALIBRATION: Final = ("statistics", "candidates", "isolated KL")


def forward_tokens_ahead(
    options: CalibrateOptions, shape: ModelShape, quant: QuantizationOptions, targets: Sequence[SearchTarget]
) -> dict[str, int]:
    """Tokens that each part runs through the whole model, at most; a backward counts as two forwards."""
    measurement = options.measurement
    source = corpus_source(options.data, options.model, shape, seed=measurement.seed)
    calibrate, select, report = (count * source.sequence_length for count in source.num_sequences)
    layers = shape.geometry.num_layers
    isolated, sequences = _isolated_runs(source.num_sequences[0], shape, quant)
    # Beside them the exact model runs once for its statistics and once for its predictions.
    layouts, lengths = _compared_settings(measurement, shape, quant, source.sequence_length)
    ahead = {
        **({"window length": calibrate * (2 + 2 * len(lengths))} if lengths else {}),
        **({"scale layouts": calibrate * (2 + layouts)} if layouts else {}),
        "statistics": calibrate,
        "candidates": calibrate * (2 + 2 * measurement.fisher_draws),
        "isolated KL": sequences * source.sequence_length * (2 + isolated * (layers + 1)) // 2
        if measurement.score == "kl"
        else 0,
    }
    if isinstance(options, SearchOptions):
        trials = _trials_of(options, targets)
        uniforms, on_all = _uniform_pairs(shape, quant, len(targets))
        # All pairs run on a part of the sequences, and the largest of the budgets on the others too.
        num_batches = -(-source.num_sequences[1] // measurement.batch_size)
        first = min(select, -(-num_batches // FIRST_PART) * measurement.batch_size * source.sequence_length)
        ahead["uniform table"] = uniforms * first + on_all * (select - first)
        ahead["refinement" if targets[0].pairs is None else "hand-written"] = select * trials
        # Every scheme at small and at large position offsets.
        ahead["validation"] = 2 * report * _validated_schemes(targets)
    return ahead


def weight_reads_ahead(
    options: CalibrateOptions, shape: ModelShape, quant: QuantizationOptions, targets: Sequence[SearchTarget]
) -> dict[str, int]:
    """How often each part of a model that is streamed reads all of its layers, at most.

    All sequences pass a layer together, `SEQUENCES_AT_ONCE` at a time, but runs that depend on each other do not.
    Counted is one worker that is not interrupted: what another one has done of a configuration is not read together.
    """
    source = corpus_source(options.data, options.model, shape, seed=options.measurement.seed)
    calibrate, select, report = (-(-count // SEQUENCES_AT_ONCE) for count in source.num_sequences)
    isolated, sequences = _isolated_runs(source.num_sequences[0], shape, quant)
    # After each stage candidates lose, so the next one begins with exact runs of its own batches, whose prompts are
    # read before what follows them.
    ends = stages(-(-sequences // options.measurement.batch_size))
    runs = [isolated * shape.geometry.num_layers * (end - begin) for begin, end in pairwise([0, *ends])]
    layouts, lengths = _compared_settings(options.measurement, shape, quant, source.sequence_length)
    ahead = {
        **({"window length": calibrate * (3 + 2 * len(lengths))} if lengths else {}),
        **({"scale layouts": calibrate * (3 + layouts)} if layouts else {}),
        "statistics": calibrate,
        "candidates": 3 * calibrate,  # up, down, and the last layers
        "isolated KL": sum(2 - (-count // SEQUENCES_AT_ONCE) for count in runs)
        if options.measurement.score == "kl"
        else 0,
    }
    if isinstance(options, SearchOptions):
        trials = _trials_of(options, targets)
        of_trial = max(select, min(source.num_sequences[1], 1 + len(RACE)))
        ahead["uniform table"] = select * (2 + sum(_uniform_pairs(shape, quant, len(targets))))  # exactly, in two parts
        ahead["refinement" if targets[0].pairs is None else "hand-written"] = select + trials * of_trial
        ahead["validation"] = 2 * report * (_validated_schemes(targets) + 1)
    return ahead


def _compared_settings(
    measurement: MeasurementOptions, shape: ModelShape, quant: QuantizationOptions, sequence_length: int
) -> tuple[int, Sequence[int]]:
    """The runs that compare scale layouts, two for a side, and the lengths of windows."""
    layouts = 2 * len(competing_layouts(measurement, shape))
    return layouts, lengths_for(sequence_length) if measurement.residual_length == "auto" else ()


def _trials_of(options: SearchOptions, targets: Sequence[SearchTarget]) -> int:
    """The configurations that the select split measures for all targets, at most."""
    return sum(1 if target.constraint is None else options.refinement_trials for target in targets)


def _isolated_runs(num_sequences: int, shape: ModelShape, quant: QuantizationOptions) -> tuple[int, int]:
    """The candidates of a layer with isolated KL, at most, and the sequences that each is measured on."""
    sides = shape.geometry.sides
    candidates = sum(min(MEASURED_TRANSFORMS, len(quant.transform_names(side))) for side in sides)
    return candidates, isolated_sequences(shape.geometry.num_layers, num_sequences)


def _uniform_pairs(shape: ModelShape, quant: QuantizationOptions, num_targets: int) -> tuple[int, int]:
    """The numbers of uniform pairs, and of those that are measured on all sequences, at most.

    There is one for each width of keys, 16 bits among them, and each of values; a latent has one side. Of the largest
    pairs inside a budget no two have keys of one width.
    """
    widths = len(quant.widths)
    num_pairs = int((widths + 1) ** len(shape.geometry.sides))
    largest = widths if len(shape.geometry.sides) > 1 else 1
    return num_pairs, min(num_pairs, num_targets * largest)


def _validated_schemes(targets: Sequence[SearchTarget]) -> int:
    """The schemes that are validated, at most: profiles, their best uniforms in both ways, and what all share."""
    return 3 * len(targets) + len(COMPARED_PAIRS) + 2


def phases_ahead(
    options: CalibrateOptions, shape: ModelShape, quant: QuantizationOptions, targets: Sequence[SearchTarget]
) -> list[tuple[str, float]]:
    """The phases of a run in their order, with the forward passes over one sequence that each takes at most."""
    ahead = forward_tokens_ahead(options, shape, quant, targets)
    calibration = sum(ahead.pop(part) for part in _CALIBRATION)
    phases: list[tuple[str, float]] = [
        (name, float(ahead[name])) for name in ("window length", "scale layouts") if name in ahead
    ]
    phases.append(("calibration" if targets else "calibrate", float(calibration)))
    if targets:
        phases.append(("uniform table", float(ahead["uniform table"])))
        for target in targets:
            if target.constraint is not None:
                phases.append((f"refinement {target.asked}", ahead["refinement"] / len(targets)))
            phases.append(("validation", ahead["validation"] / len(targets)))
    sequence_length = corpus_source(options.data, options.model, shape, seed=options.measurement.seed).sequence_length
    return [(name, tokens / sequence_length) for name, tokens in phases]


class ForwardProgress:
    """Shows how many of the forward passes ahead of a run are done, and about how long the rest takes.

    What a phase did not need is left out when it ends. The time left is at the rate of the whole run so far.
    """

    def __init__(self, phases: Sequence[tuple[str, float]] = ()) -> None:
        """Take phases with their forward passes, in the order in which they run; without any nothing is shown."""
        self._ahead = list(phases)
        self._done = self._seconds = 0.0

    @contextmanager
    def phase(self, name: str, passes: Callable[[], float]) -> Iterator[None]:
        """Show the progress while a phase runs; `passes` tells the forward passes of the phase so far."""
        if name not in (phase for phase, _ in self._ahead):
            yield
            return
        total = self._done + sum(passes_of for _, passes_of in self._ahead)
        counts = {"total": round(total), "initial": int(self._done), "miniters": 1}
        with ProgressBar(desc="forward passes", unit="", smoothing=0, leave=False, **counts) as bar:
            if not bar.disable:  # TQDM_DISABLE, of tqdm itself
                # The rate is that of all phases: since the run began, and of all that it did.
                bar.start_t, bar.initial = bar.start_t - self._seconds, 0
            began = time.monotonic()
            ended = threading.Event()

            def follow() -> None:
                while not bar.disable:
                    bar.n = min(int(self._done + passes()), bar.total)
                    bar.update(0)
                    if ended.wait(REFRESH_S):
                        return

            thread = threading.Thread(target=follow, name="kvtuner-progress", daemon=True)
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()
                self._done += passes()
                self._seconds += time.monotonic() - began
                self._ahead.remove(next(item for item in self._ahead if item[0] == name))
