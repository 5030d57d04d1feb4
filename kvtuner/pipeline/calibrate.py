"""A calibration: the sensitivity table alone, which a search in the same run folder reuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtuner.calibration import workbench
from kvtuner.calibration.model_loading import read_shape
from kvtuner.calibration.sensitivity import TABLE_FILE, SensitivityTable
from kvtuner.pipeline.progress import say
from kvtuner.pipeline.sources import model_source, run_folder
from kvtuner.pipeline.stages.search_run import Phases, calibration_options, load_workbench

if TYPE_CHECKING:
    from pathlib import Path

    from kvtuner.pipeline.options import CalibrateOptions


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """What a calibration measured.

    Attributes:
        table: The sensitivity table.
        file: The table's file in the run folder.
        forward_passes: The forward passes that were run for it.
    """

    table: SensitivityTable
    file: Path
    forward_passes: float

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {
            "table": str(self.file),
            "candidates": len(self.table.scores),
            "isolated_kl": sum(scores.kl is not None for scores in self.table.scores.values()),
            "forward_passes": round(self.forward_passes, 2),
        }


def calibrate(options: CalibrateOptions) -> CalibrationResult:
    """Measure the sensitivity of every layer, or go on where the same calibration was interrupted.

    Raises:
        KVTunerError: Something that is asked for cannot be done; the message says what would work.
    """
    shape = read_shape(model_source(options.model))
    calibration_options(options.measurement, shape)  # refused before anything is loaded
    folder = run_folder(options.model, options.out, "calibration")
    bench = load_workbench(options, shape)
    folder.create()
    phases = Phases(bench, folder)
    with phases.phase("calibrate"):
        table = workbench.calibrate(bench, folder, say)
    return CalibrationResult(table, folder.file(TABLE_FILE), phases.passes["calibrate"])
