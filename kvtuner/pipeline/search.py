"""A search, from a model to profiles with their reports, and a calibration, which is the first part of one."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvtuner.calibration.sensitivity import TABLE_FILE, SensitivityTable
from kvtuner.evaluation.validation import Validator
from kvtuner.exported_configs.profile.build import write_profile
from kvtuner.pipeline.provenance import search_command
from kvtuner.pipeline.sources import run_folder
from kvtuner.pipeline.stages.baseline_comparison import BaselineComparison
from kvtuner.pipeline.stages.budget_search import BudgetSearch
from kvtuner.pipeline.stages.rank_processes import folder_of, in_groups, rank_group, refuse_ranks
from kvtuner.pipeline.stages.search_output import make_profile, make_report_data
from kvtuner.pipeline.stages.search_run import SearchRun, calibration_options, checked_shape, measure_sensitivity
from kvtuner.pipeline.stages.search_targets import (
    WRITE_LOCK,
    SearchTarget,
    bind_targets,
    refuse_other_targets,
    targets_of,
)
from kvtuner.pipeline.stages.time_limit import TimeLimit
from kvtuner.pipeline.stages.work_ahead import phases_ahead
from kvtuner.pipeline.stages.worker_processes import WorkerPlace, placed, quiet_unless_first, workers_beside
from kvtuner.report.search_data import DATA_FILE, ReportData
from kvtuner.report.search_report import summary_json, write_search_report
from kvtuner.report.table import RecordTable, record_table
from kvtuner.run_folder import RunFolder, sha256_of
from kvtuner.tuner.objective import MeasuredKL
from kvtuner.tuner.study_storage import is_shared_database
from kvtuner.workers.database_folder import DatabaseFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.verdict import Verdict
    from kvtuner.pipeline.options import CalibrateOptions, SearchOptions
    from kvtuner.pipeline.stages.worker_processes import WaitingWorkers


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


def run_calibration(options: CalibrateOptions, *, waiting: WaitingWorkers | None = None) -> CalibrationResult:
    """Measure the sensitivity of every layer, or go on where the same calibration was interrupted.

    Its other workers are those that are `waiting`, or are started.
    """
    folder = run_folder(options.model, options.out, "calibration")
    refuse_ranks(options, WorkerPlace.from_environment())
    checked_shape(options)
    with workers_beside(options, folder, _calibrate, waiting) as place:
        return _calibrate(options, place)


def _calibrate(options: CalibrateOptions, place: WorkerPlace) -> CalibrationResult:
    folder = run_folder(options.model, options.out, "calibration")
    options = placed(options, place)
    shape = checked_shape(options)
    with quiet_unless_first(place, folder), rank_group(place, options.tp) as group:
        ahead = phases_ahead(options, shape, calibration_options(options.measurement, shape).quant, [])
        led = folder_of(group, folder)
        phases, table = measure_sensitivity(options, shape, led, phase="calibrate", ahead=ahead)
    return CalibrationResult(table, folder.file(TABLE_FILE), phases.passes["calibrate"])


@dataclass(frozen=True, slots=True, repr=False)
class SearchResult:
    """One profile that a search made, its file in the run folder, and the page of its report, if one was written.

    `data` is everything that the report shows; forward passes are by phase, up to the validation.
    """

    profile: Profile
    file: Path
    report: Path | None
    data: ReportData
    forward_passes: Mapping[str, float]

    def __repr__(self) -> str:
        return f"SearchResult({self.data.budget.asked!r}, {str(self.file)!r}, {self.profile!r})"

    def _repr_html_(self) -> str:
        return self.profile._repr_html_()

    @property
    def run_folder(self) -> Path:
        """The folder that holds everything that was measured; the same search goes on there."""
        return self.file.parent

    @property
    def verdict(self) -> Verdict | None:
        """What the profile gained, and what to do; None where nothing was measured."""
        return self.data.verdict

    @property
    def layers(self) -> RecordTable:
        """The bits and transforms of every layer."""
        return record_table(asdict(row) for row in self.data.layers)

    @property
    def quality(self) -> RecordTable:
        """The winner and every baseline on the report split, at small and at large positions."""
        return record_table(record for offsets in self.data.quality for record in offsets.records())

    @property
    def trials(self) -> RecordTable:
        """The trials of the refinement; none where nothing was refined."""
        return record_table(asdict(row) for row in self.data.trials)

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {
            "profile": str(self.file),
            "report": None if self.report is None else str(self.report),
            "digest": self.profile.digest,
            "forward_passes": {phase: round(passes, 2) for phase, passes in self.forward_passes.items()},
            **summary_json(self.data),
        }


def run_search(
    options: SearchOptions,
    *,
    on_result: Callable[[SearchResult], None] | None = None,
    waiting: WaitingWorkers | None = None,
) -> list[SearchResult]:
    """Search, or go on where the same search was interrupted; returns one result for each budget, in their order.

    `on_result` is called with every result as soon as its files are written. Its other workers are those that are
    `waiting`, or are started.
    """
    refuse_ranks(options, WorkerPlace.from_environment())
    shape = checked_shape(options)
    targets = targets_of(options, shape, calibration_options(options.measurement, shape).quant)
    folder = _search_folder(options, targets)
    refuse_other_targets(folder, targets)
    with workers_beside(options, folder, _search, waiting) as place:
        return _search(options, place, on_result)


def _search_folder(options: SearchOptions, targets: Sequence[SearchTarget]) -> RunFolder:
    """The run folder; with a database that other machines reach, only what a person reads lies there."""
    folder = run_folder(options.model, options.out, "+".join(target.name for target in targets))
    if options.storage is not None and is_shared_database(options.storage):
        return DatabaseFolder(folder.path, options.storage)
    return folder


def _search(
    options: SearchOptions, place: WorkerPlace, on_result: Callable[[SearchResult], None] | None = None
) -> list[SearchResult]:
    """Search as one of the processes that were started together; the first one alone has results."""
    began = time.monotonic()
    options = placed(options, place)
    shape = checked_shape(options)
    quant = calibration_options(options.measurement, shape).quant
    targets = targets_of(options, shape, quant)
    folder = _search_folder(options, targets)
    with quiet_unless_first(place, folder), rank_group(place, options.tp) as group:
        ahead = phases_ahead(options, shape, quant, targets)
        limit = None if options.time_limit is None else TimeLimit(options.time_limit, ahead, began)
        led = folder_of(group, folder)
        phases, table = measure_sensitivity(options, shape, led, phase="calibration", ahead=ahead)
        if phases.layouts or phases.window_length:
            # Rows of 8 bits may have become longer, and copies take bytes of some budgets.
            targets = targets_of(options, shape, phases.bench.options.quant)
        group.lead(lambda: bind_targets(folder, targets))
        return _search_targets(SearchRun(options, phases, table, group), targets, place, on_result, limit)


def _search_targets(
    run: SearchRun,
    targets: Sequence[SearchTarget],
    place: WorkerPlace,
    on_result: Callable[[SearchResult], None] | None,
    limit: TimeLimit | None,
) -> list[SearchResult]:
    identity = sha256_of(run.table.identity)
    with run.phases.phase("uniform table"):
        simulator = run.bench.simulator("select", reuse=True)
        objective = MeasuredKL(simulator, run.table, run.bench.options.quant, run.folder, identity)
        budget_search = BudgetSearch(run, objective, limit=limit)
        uniform_kl = budget_search.uniform_table(targets)
    family = budget_search.family(targets) if run.options.nested else [None] * len(targets)
    validator = Validator(run.bench, run.folder, identity)
    results = list[SearchResult]()
    for target, member in zip(targets, family, strict=True):
        outcome = budget_search.winner(target, member, uniform_kl)
        with run.phases.phase("validation"):
            comparison = BaselineComparison(run, outcome, validator)

        def write(target: SearchTarget = target, comparison: BaselineComparison = comparison) -> None:
            with run.folder.lock(WRITE_LOCK, waiting="another worker writes the results"):
                results.append(_finish(run, target, comparison))
            if on_result is not None:
                on_result(results[-1])

        if in_groups(place, run.options.tp)[0] == 0:
            run.group.lead(write)
    return results


def _finish(run: SearchRun, target: SearchTarget, comparison: BaselineComparison) -> SearchResult:
    quality = comparison.quality()
    profile = make_profile(comparison, quality, command=search_command(run.options))
    file = run.folder.file(target.profile_file)
    write_profile(file, profile)
    data = make_report_data(comparison, profile, quality)
    folder = RunFolder(run.folder.file(f"report{target.suffix}")) if target.suffix else run.folder
    folder.create()
    folder.write_checked(DATA_FILE, data.to_json())
    page = write_search_report(data, folder.path) if run.options.report else None
    run.folder.log("profile", file=file.name, digest=profile.digest, asked=comparison.outcome.asked)
    return SearchResult(profile, file, page, data, dict(run.phases.passes))
