"""What the report of a finished search shows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvtuner import __version__
from kvtuner.evaluation.validation import UNIFORM_PAIRS
from kvtuner.precision import PrecisionPair, effective_bits, mean_bits
from kvtuner.report.search_data import (
    AdditivityRow,
    BudgetOutcome,
    MeasuredPoint,
    OffsetQuality,
    ReportData,
    TrialPoint,
    UniformKl,
)
from kvtuner.report.search_rows import front_points, layer_rows, pair_additivity, rank_correlations, sensitivity_rows
from kvtuner.search_spaces.space import pairs_of, predicted_score

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.pipeline.stages.budget_search import SearchOutcome
    from kvtuner.pipeline.stages.comparison import BaselineComparison
    from kvtuner.pipeline.stages.search_run import SearchRun


def make_report_data(
    comparison: BaselineComparison, profile: Profile, quality: tuple[OffsetQuality, ...]
) -> ReportData:
    """Everything that the report draws from."""
    run, outcome = comparison.run, comparison.outcome
    rows, ranks, measurement = run.rows, run.ranks, run.options.measurement
    return ReportData(
        model=profile.model.id,
        corpus=run.corpus_source.name,
        read_plan=measurement.read_plan,
        score=measurement.score,
        budget=BudgetOutcome(
            asked=outcome.asked,
            mean_bits=float(profile.mean_bits),
            effective_bits=float(profile.effective_bits),
            bytes_per_token=ranks.bytes_per_token(profile.pairs),
            bf16_bytes_per_token=ranks.bf16_bytes_per_token(),
            tp_size=run.options.tp_size,
            pp_size=run.options.pp_size,
        ),
        layers=layer_rows(outcome.configuration),
        quality=quality,
        sensitivity=sensitivity_rows(run.table),
        front=front_points(outcome.fronts, rows),
        measured=_measured_points(run, outcome),
        trials=_trial_points(outcome),
        gain=outcome.gain,
        uniform_winner=None if outcome.uniform_name is None else quality[0].winner.label,
        rank_correlations=rank_correlations(run.table),
        additivity=_additivity(run, outcome),
        pair_additivity=pair_additivity(run.table) if measurement.pairs else None,
        uniform_kl=tuple(UniformKl(pair.k_bits, pair.v_bits, kl) for pair, kl in outcome.uniform_kl.items()),
        forwards=tuple((phase, round(passes)) for phase, passes in run.phases.passes.items()),
        provenance=_facts(run, profile),
    )


def _measured_points(run: SearchRun, outcome: SearchOutcome) -> tuple[MeasuredPoint, ...]:
    rows = run.rows
    points: list[tuple[list[PrecisionPair], float | None, str]] = [
        ([pair] * run.shape.geometry.num_layers, kl, "uniform") for pair, kl in outcome.uniform_kl.items()
    ]
    if outcome.study is not None:
        points += [(pairs_of(t.configuration), t.value, "trial") for t in outcome.study.trials if t.value is not None]
    points.append((pairs_of(outcome.configuration), outcome.measured_kl, "winner"))
    return tuple(
        MeasuredPoint(float(effective_bits(pairs, rows)), float(mean_bits(pairs, rows)), kl, kind)
        for pairs, kl, kind in points
    )


def _trial_points(outcome: SearchOutcome) -> tuple[TrialPoint, ...]:
    trials = () if outcome.study is None else outcome.study.trials
    return tuple(TrialPoint(t.number, t.value, t.is_feasible, t.source) for t in trials)


def _additivity(run: SearchRun, outcome: SearchOutcome) -> tuple[AdditivityRow, ...]:
    """Predicted beside measured: the winner, the exact solution and uniforms; only where scores are nats."""
    if run.options.measurement.score == "e_o":
        return ()
    checks = [] if outcome.measured_kl is None else [("winner", outcome.configuration, outcome.measured_kl)]
    if outcome.exact is not None and outcome.exact_kl is not None:
        checks.append(("exact", outcome.exact, outcome.exact_kl))
    for pair in UNIFORM_PAIRS:
        if pair in outcome.uniform_kl:
            configuration = run.uniform(pair, transforms=True)
            checks.append((str(pair), configuration, outcome.uniform_kl[pair]))
    predicted = [(name, predicted_score(configuration), kl) for name, configuration, kl in checks]
    return tuple(AdditivityRow(name, score, kl) for name, score, kl in predicted if not math.isnan(score))


def _facts(run: SearchRun, profile: Profile) -> tuple[tuple[str, str], ...]:
    source = run.corpus_source
    search = profile.provenance.search
    facts = {
        "digest": profile.digest,
        "architecture": profile.model.architecture,
        "dtype": profile.model.dtype,
        "sequences": f"{source.num_sequences} of {source.sequence_length} tokens (calibrate, select, report)",
        "positions": f"random offsets within {run.shape.context_length} tokens",
        "seed": str(run.seed),
        **({} if search is None else {"sampler": f"{search.sampler}, {search.trials} trials"}),
        "kvtuner": __version__,
        **profile.provenance.libraries.model_dump(),
    }
    return tuple(facts.items())
