"""A calibration: the sensitivity table alone, which a search in the same run folder reuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtuner.calibration.sensitivity import TABLE_FILE, SensitivityTable
from kvtuner.pipeline.sources import run_folder
from kvtuner.pipeline.stages.search_run import checked_shape, measure_sensitivity

if TYPE_CHECKING:
    from pathlib import Path

    from kvtuner.pipeline.options import CalibrateOptions


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The sensitivity table, its file in the run folder, and the forward passes that were run for it."""

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


def run_calibration(options: CalibrateOptions) -> CalibrationResult:
    """Measure the sensitivity of every layer, or go on where the same calibration was interrupted."""
    shape = checked_shape(options)
    folder = run_folder(options.model, options.out, "calibration")
    phases, table = measure_sensitivity(options, shape, folder, phase="calibrate")
    return CalibrationResult(table, folder.file(TABLE_FILE), phases.passes["calibrate"])
