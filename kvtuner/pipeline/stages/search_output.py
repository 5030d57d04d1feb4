"""The exports of a finished search: the profile of the winner with its measured quality, and the report's data."""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from kvtuner import __version__
from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, build_profile, of_whole_model
from kvtuner.exported_configs.profile.records import (
    BaselineRecord,
    BudgetPoint,
    CalibrationRecord,
    IntervalRecord,
    Libraries,
    Provenance,
    QualityRecord,
    SearchRecord,
    SplitCounts,
    SplitHashes,
    UniformRecord,
)
from kvtuner.exported_configs.verdict import TRANSFORMED, verdict_of
from kvtuner.pipeline.placed_constants import place_as_asked
from kvtuner.pipeline.stages.baseline_comparison import BaselineComparison, largest_uniforms
from kvtuner.pipeline.stages.scale_words import layouts_text
from kvtuner.precision import PrecisionPair, effective_bits, mean_bits
from kvtuner.report.search_data import (
    AdditivityRow,
    BudgetOutcome,
    MeasuredPoint,
    OffsetQuality,
    QualityRow,
    ReportData,
    TrialPoint,
    UniformKl,
)
from kvtuner.report.search_rows import front_points, layer_rows, pair_additivity, rank_correlations, sensitivity_rows
from kvtuner.search_spaces.space import pairs_of, predicted_score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.sensitivity import SensitivityTable
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.pipeline.stages.budget_search import SearchOutcome
    from kvtuner.pipeline.stages.search_run import SearchRun
    from kvtuner.search_spaces.space import Configuration


SHOWN_BUDGETS: Final = (2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)
"""The payload bits for which a profile says what larger budgets would have."""
LEAST_STEP: Final = 0.25
"""The bits by which a larger budget exceeds what was reached."""


def make_profile(comparison: BaselineComparison, quality: Sequence[OffsetQuality], *, command: str) -> Profile:
    """The profile of the winner; `command` is the search that makes it again, as it may be shared."""
    run, outcome = comparison.run, comparison.outcome
    quant, loaded = run.bench.options.quant, run.bench.loaded
    geometry, layers = of_whole_model(run.bench.chain.cache, chosen_layers(run.table, outcome.configuration))
    profile = build_profile(
        geometry=geometry,
        layers=layers,
        k_layout=quant.k_layout,
        v_layout=quant.v_layout,
        symmetric=quant.symmetric,
        fit=quant.fit,
        window=quant.window,
        model=run.shape.identity(loaded.source, loaded.dtype_name, loaded.tokenizer),
        budget=AskedBudget(outcome.asked, run.options.tp_size, run.options.pp_size),
        quality=_quality(comparison, quality[0].baselines),
        provenance=_provenance(run, outcome, command),
    )
    return place_as_asked(profile, run.options.constants)


def chosen_layers(table: SensitivityTable, configuration: Configuration) -> list[LayerQuantization]:
    """The tuned layers of a configuration, as a profile is built from them."""
    return [
        LayerQuantization(
            choice.pair.k_bits,
            choice.pair.v_bits,
            table.constants_of(layer, "k", choice.k_transform),
            table.constants_of(layer, "v", choice.v_transform),
        )
        for layer, choice in zip(table.geometry.ids, configuration, strict=True)
    ]


def _quality(comparison: BaselineComparison, rows: Sequence[QualityRow]) -> QualityRecord:
    """Winner, unquantized model and baselines, each over all kinds of offsets; `rows` are the report's baselines."""
    run, winner = comparison.run, comparison.pooled(comparison.winner)
    predicted = predicted_score(comparison.outcome.configuration)
    # A uniform without transforms may not have been scored, and e_o is not in nats.
    is_known = run.options.measurement.score != "e_o" and not math.isnan(predicted)
    baselines = []
    for baseline, row in zip(comparison.baselines, rows, strict=True):
        kl = comparison.pooled(baseline).kl_interval(run.seed)
        bits = {"mean_bits": row.mean_bits, "effective_bits": row.effective_bits}
        baselines.append(BaselineRecord(name=row.label, **bits, kl_mean=kl.mean, kl_low=kl.low, kl_high=kl.high))
    return QualityRecord(
        metric="kl_nats_per_token",
        read_plan=run.options.measurement.read_plan,
        split_tokens=sum(winner.count) // len(comparison.measured[comparison.winner.key]),
        predicted_kl=predicted if is_known else None,
        measured_kl=IntervalRecord(**asdict(winner.kl_interval(run.seed))),
        kl_p99=winner.kl_p99,
        top1_agreement=winner.top1_agreement,
        perplexity=winner.perplexity,
        reference_perplexity=comparison.pooled(comparison.reference).perplexity,
        baselines=tuple(baselines),
        best_uniform=_best_uniform(comparison),
        larger_budgets=_larger_budgets(run, comparison.outcome) if is_known else None,
    )


def _best_uniform(comparison: BaselineComparison) -> UniformRecord | None:
    """The best uniform by its label among the baselines, and the paired difference over all kinds of offsets."""
    uniform = comparison.best_uniform
    if uniform is None:
        return None
    difference = comparison.winner_less(uniform)
    label = f"{uniform.name}{TRANSFORMED}" if uniform.has_transforms else uniform.name
    return UniformRecord(name=label, difference=IntervalRecord(**asdict(difference)))


def _larger_budgets(run: SearchRun, outcome: SearchOutcome) -> tuple[BudgetPoint, ...] | None:
    """The exact front at larger budgets of payload; None where pipeline stages were solved apart."""
    points = front_points(outcome.fronts, run.rows)
    reached = float(mean_bits(pairs_of(outcome.configuration), run.rows))
    found = []
    for budget in SHOWN_BUDGETS:
        inside = [point for point in points if point.mean_bits <= budget]
        if inside and budget >= reached + LEAST_STEP:
            best = min(inside, key=lambda point: (point.predicted_kl, point.effective_bits))
            bits = {"mean_bits": budget, "effective_bits": best.effective_bits}
            found.append(BudgetPoint(**bits, predicted_kl=best.predicted_kl))
    return tuple(found) or None


def _provenance(run: SearchRun, outcome: SearchOutcome, command: str) -> Provenance:
    source = run.corpus_source
    counts = dict(zip(("calibrate", "select", "report"), source.num_sequences, strict=True))
    return Provenance(
        kvtuner_version=__version__,
        calibration=CalibrationRecord(
            corpus=source.name,
            token_ids_sha256=SplitHashes(**run.bench.corpus.hashes()),
            num_sequences=SplitCounts(**counts),
            sequence_length=source.sequence_length,
            position_range=(0, run.shape.context_length - 1),
            seed=run.seed,
            score=run.options.measurement.score,
        ),
        search=None
        if outcome.study is None
        else SearchRecord(sampler=run.options.refinement_sampler, trials=len(outcome.study.trials), seed=run.seed),
        libraries=Libraries(**{name: importlib.metadata.version(name) for name in ("torch", "transformers", "optuna")}),
        command=command,
    )


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
            bytes_per_token=ranks.bytes_per_token(profile.tuned_pairs),
            bf16_bytes_per_token=ranks.bf16_bytes_per_token(),
            tp_size=run.options.tp_size,
            pp_size=run.options.pp_size,
            residual_length=profile.window.residual_length,
            sinks=profile.window.sinks,
            window_bytes=ranks.window_bytes(profile.tuned_pairs, profile.window),
            context_length=run.shape.context_length,
            index_bytes=run.shape.cache.index_bytes(),
        ),
        layers=layer_rows(outcome.configuration, run.shape.geometry.ids),
        quality=quality,
        sensitivity=sensitivity_rows(run.table),
        front=front_points(outcome.fronts, rows),
        measured=_measured_points(run, outcome),
        trials=tuple(TrialPoint(t.number, t.value, t.is_feasible, t.source) for t in outcome.trials),
        refinement=outcome.gain,
        uniform_winner=None if outcome.uniform_name is None else quality[0].winner.label,
        rank_correlations=rank_correlations(run.table),
        additivity=_additivity(run, outcome),
        pair_additivity=pair_additivity(run.table) if measurement.pairs else None,
        uniform_kl=tuple(UniformKl(pair.k_bits, pair.v_bits, kl) for pair, kl in outcome.uniform_kl.items()),
        scale_words=""
        if measurement.word_bits == "32"
        else layouts_text(run.bench.options.quant, run.shape, run.layouts),
        verdict=verdict_of(profile),
        window_length="" if run.window_length is None else str(run.window_length),
        forwards=tuple((phase, round(passes)) for phase, passes in run.phases.passes.items()),
        provenance=_facts(run, profile),
    )


def _measured_points(run: SearchRun, outcome: SearchOutcome) -> tuple[MeasuredPoint, ...]:
    rows = run.rows
    points: list[tuple[list[PrecisionPair], float | None, str]] = [
        ([pair] * run.shape.geometry.num_layers, kl, "uniform") for pair, kl in outcome.uniform_kl.items()
    ]
    points += [(pairs_of(t.configuration), t.value, "trial") for t in outcome.trials if t.value is not None]
    points.append((pairs_of(outcome.configuration), outcome.measured_kl, "winner"))
    return tuple(
        MeasuredPoint(float(effective_bits(pairs, rows)), float(mean_bits(pairs, rows)), kl, kind)
        for pairs, kl, kind in points
    )


def _additivity(run: SearchRun, outcome: SearchOutcome) -> tuple[AdditivityRow, ...]:
    """Predicted beside measured, where scores are nats: the winner, the exact solution, uniforms that were measured."""
    if run.options.measurement.score == "e_o":
        return ()
    checks = [] if outcome.measured_kl is None else [("winner", outcome.configuration, outcome.measured_kl)]
    if outcome.exact is not None and outcome.exact_kl is not None:
        checks.append(("exact", outcome.exact, outcome.exact_kl))
    for pair in largest_uniforms(run, outcome):
        checks.append((str(pair), run.uniform(pair, transforms=True), outcome.uniform_kl[pair]))
    rows = [AdditivityRow(name, predicted_score(configuration), kl) for name, configuration, kl in checks]
    return tuple(row for row in rows if not math.isnan(row.predicted))


def _facts(run: SearchRun, profile: Profile) -> tuple[tuple[str, str], ...]:
    source, search = run.corpus_source, profile.provenance.search
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
