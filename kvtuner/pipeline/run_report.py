"""What the report of a finished search shows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvtuner import __version__
from kvtuner.evaluation.validation import UNIFORM_PAIRS
from kvtuner.pipeline.session import corpus_source, ranks_of, row_shape
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
from kvtuner.search_spaces.space import pairs_of, predicted_score, uniform

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.pipeline.session import SearchOutcome, SearchRun


def make_report_data(
    run: SearchRun, found: SearchOutcome, profile: Profile, quality: tuple[OffsetQuality, ...]
) -> ReportData:
    """Everything that the report draws from."""
    rows, ranks = row_shape(run.args, run.shape), ranks_of(run.args, run.shape)
    return ReportData(
        model=profile.model.id,
        corpus=corpus_source(run.args, run.shape).name,
        read_plan=run.args.read_plan,
        score=run.args.score,
        budget=BudgetOutcome(
            asked=found.asked,
            mean_bits=float(profile.mean_bits),
            effective_bits=float(profile.effective_bits),
            bytes_per_token=ranks.bytes_per_token(profile.pairs),
            bf16_bytes_per_token=ranks.bf16_bytes_per_token(),
            tp_size=run.args.tp_size,
            pp_size=run.args.pp_size,
        ),
        layers=layer_rows(found.configuration),
        quality=quality,
        sensitivity=sensitivity_rows(run.table),
        front=front_points(found.fronts, rows),
        measured=_measured_points(found, run),
        trials=_trial_points(found),
        gain=found.gain,
        uniform_winner=None if found.uniform_name is None else quality[0].winner.label,
        rank_correlations=rank_correlations(run.table),
        additivity=_additivity(run, found),
        pair_additivity=pair_additivity(run.table) if run.args.pairs else None,
        uniform_kl=tuple(UniformKl(pair.k_bits, pair.v_bits, kl) for pair, kl in found.uniform_kl.items()),
        forwards=tuple((phase, round(passes)) for phase, passes in run.phases.passes.items()),
        provenance=_facts(run, profile),
    )


def _measured_points(found: SearchOutcome, run: SearchRun) -> tuple[MeasuredPoint, ...]:
    rows = row_shape(run.args, run.shape)
    points: list[tuple[list[PrecisionPair], float | None, str]] = [
        ([pair] * run.shape.geometry.num_layers, kl, "uniform") for pair, kl in found.uniform_kl.items()
    ]
    if found.study is not None:
        points += [(pairs_of(t.configuration), t.value, "trial") for t in found.study.trials if t.value is not None]
    points.append((pairs_of(found.configuration), found.measured_kl, "winner"))
    return tuple(
        MeasuredPoint(float(effective_bits(pairs, rows)), float(mean_bits(pairs, rows)), kl, kind)
        for pairs, kl, kind in points
    )


def _trial_points(found: SearchOutcome) -> tuple[TrialPoint, ...]:
    trials = () if found.study is None else found.study.trials
    return tuple(TrialPoint(t.number, t.value, t.is_feasible, t.source) for t in trials)


def _additivity(run: SearchRun, found: SearchOutcome) -> tuple[AdditivityRow, ...]:
    """Predicted beside measured: the winner, the exact solution and uniforms; only where scores are nats."""
    if run.args.score == "e_o":
        return ()
    rows = row_shape(run.args, run.shape)
    checks = [] if found.measured_kl is None else [("winner", found.configuration, found.measured_kl)]
    if found.exact is not None and found.exact_kl is not None:
        checks.append(("exact", found.exact, found.exact_kl))
    for pair in UNIFORM_PAIRS:
        if pair in found.uniform_kl:
            configuration = uniform(run.table, pair, run.args.score, rows, transforms=True)
            checks.append((str(pair), configuration, found.uniform_kl[pair]))
    predicted = [(name, predicted_score(configuration), kl) for name, configuration, kl in checks]
    return tuple(AdditivityRow(name, score, kl) for name, score, kl in predicted if not math.isnan(score))


def _facts(run: SearchRun, profile: Profile) -> tuple[tuple[str, str], ...]:
    source = corpus_source(run.args, run.shape)
    search = profile.provenance.search
    facts = {
        "digest": profile.digest,
        "architecture": profile.model.architecture,
        "dtype": profile.model.dtype,
        "sequences": f"{source.num_sequences} of {source.sequence_length} tokens (calibrate, select, report)",
        "positions": f"random offsets within {run.shape.context_length} tokens",
        "seed": str(run.args.seed),
        **({} if search is None else {"sampler": f"{search.sampler}, {search.trials} trials"}),
        "kvtuner": __version__,
        **profile.provenance.libraries.model_dump(),
    }
    return tuple(facts.items())
