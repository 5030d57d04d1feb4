"""The profile that a finished search exports: the winner, its measured quality and where it comes from."""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvtuner import __version__
from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, build_profile
from kvtuner.exported_configs.profile.evidence import (
    BaselineRecord,
    CalibrationRecord,
    IntervalRecord,
    Libraries,
    Provenance,
    QualityRecord,
    SearchRecord,
    SplitCounts,
    SplitHashes,
)
from kvtuner.search_spaces.space import predicted_score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.pipeline.stages.budget_search import SearchOutcome
    from kvtuner.pipeline.stages.comparison import BaselineComparison
    from kvtuner.pipeline.stages.search_run import SearchRun
    from kvtuner.report.search_data import OffsetQuality, QualityRow


def make_profile(comparison: BaselineComparison, quality: Sequence[OffsetQuality], *, command: str) -> Profile:
    """The profile of the winner.

    Args:
        comparison: The winner and its baselines, measured.
        quality: The rows that a report shows of it.
        command: The search that makes the profile again, as it may be shared.
    """
    run, outcome = comparison.run, comparison.outcome
    geometry, quant, loaded = run.shape.geometry, run.bench.options.quant, run.bench.loaded
    return build_profile(
        geometry=geometry,
        layers=[
            LayerQuantization(
                choice.pair.k_bits,
                choice.pair.v_bits,
                run.table.constants_of(layer, "k", choice.k_transform),
                run.table.constants_of(layer, "v", choice.v_transform),
            )
            for layer, choice in enumerate(outcome.configuration)
        ],
        k_group_size=quant.k_group_size or geometry.head_dim,
        v_group_size=quant.v_group_size or geometry.v_head_dim,
        symmetric=quant.symmetric,
        model=run.shape.identity(loaded.source, loaded.dtype_name, loaded.tokenizer),
        budget=AskedBudget(outcome.asked, run.options.tp_size, run.options.pp_size),
        quality=_quality(comparison, quality[0].baselines),
        provenance=_provenance(run, outcome, command),
    )


def _quality(comparison: BaselineComparison, rows: Sequence[QualityRow]) -> QualityRecord:
    """Winner, unquantized model and baselines, each over all kinds of offsets; `rows` are the report's baselines."""
    run, winner = comparison.run, comparison.pooled(comparison.winner)
    baselines = []
    for baseline, row in zip(comparison.baselines, rows, strict=True):
        kl = comparison.pooled(baseline).kl_interval(run.seed)
        bits = {"mean_bits": row.mean_bits, "effective_bits": row.effective_bits}
        baselines.append(BaselineRecord(name=row.label, **bits, kl_mean=kl.mean, kl_low=kl.low, kl_high=kl.high))
    return QualityRecord(
        metric="kl_nats_per_token",
        read_plan=run.options.measurement.read_plan,
        split_tokens=sum(winner.count) // len(comparison.measured[comparison.winner.key]),
        predicted_kl=_predicted_kl(run, comparison.outcome),
        measured_kl=IntervalRecord(**asdict(winner.kl_interval(run.seed))),
        kl_p99=winner.kl_p99,
        top1_agreement=winner.top1_agreement,
        perplexity=winner.perplexity,
        reference_perplexity=comparison.pooled(comparison.reference).perplexity,
        baselines=tuple(baselines),
    )


def _predicted_kl(run: SearchRun, outcome: SearchOutcome) -> float | None:
    """The additive prediction where it is in nats and known: a uniform without transforms may not have been scored."""
    predicted = predicted_score(outcome.configuration)
    return None if run.options.measurement.score == "e_o" or math.isnan(predicted) else predicted


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
