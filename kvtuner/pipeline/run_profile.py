"""The profile that a finished search exports: the winner, its measured quality and where it comes from."""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvtuner import __version__
from kvtuner.evaluation.validation import pooled
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
from kvtuner.pipeline.session import corpus_source
from kvtuner.search_spaces.space import predicted_score

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.evaluation import statistics
    from kvtuner.evaluation.scheme import CacheScheme
    from kvtuner.evaluation.validation import SequenceSums
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.pipeline.session import Measured, SearchOutcome, SearchRun
    from kvtuner.report.search_data import QualityRow


def make_profile(run: SearchRun, found: SearchOutcome, quality: QualityRecord) -> Profile:
    """The profile of the winner."""
    geometry, options, loaded = run.shape.geometry, run.bench.options, run.bench.loaded
    return build_profile(
        geometry=geometry,
        layers=[
            LayerQuantization(
                choice.pair.k_bits,
                choice.pair.v_bits,
                run.table.constants_of(layer, "k", choice.k_transform),
                run.table.constants_of(layer, "v", choice.v_transform),
            )
            for layer, choice in enumerate(found.configuration)
        ],
        k_group_size=options.quant.k_group_size or geometry.head_dim,
        v_group_size=options.quant.v_group_size or geometry.v_head_dim,
        symmetric=options.quant.symmetric,
        model=run.shape.identity(loaded.source, loaded.dtype_name, loaded.tokenizer),
        budget=AskedBudget(found.asked, run.args.tp_size, run.args.pp_size),
        quality=quality,
        provenance=_provenance(run, found),
    )


def stored_quality(
    run: SearchRun,
    found: SearchOutcome,
    winner: CacheScheme,
    schemes: Sequence[CacheScheme],
    measured: Mapping[str, Measured],
    rows: Sequence[QualityRow],
) -> QualityRecord:
    """Winner, unquantized model and baselines, each over all kinds of offsets.

    Args:
        run: the run.
        found: what the search found.
        winner: what the profile holds.
        schemes: the unquantized model, then the baselines.
        measured: results by key of scheme.
        rows: the baselines as a report shows them.
    """

    def over_all_offsets(scheme: CacheScheme) -> SequenceSums:
        return pooled(list(measured[scheme.key].values()))

    reference, *baselines = schemes
    both = over_all_offsets(winner)
    return QualityRecord(
        metric="kl_nats_per_token",
        read_plan=run.args.read_plan,
        split_tokens=sum(both.count) // len(measured[winner.key]),
        predicted_kl=_predicted_kl(run, found),
        measured_kl=IntervalRecord(**asdict(both.kl_interval(run.args.seed))),
        kl_p99=both.kl_p99,
        top1_agreement=both.top1_agreement,
        perplexity=both.perplexity,
        reference_perplexity=over_all_offsets(reference).perplexity,
        baselines=tuple(
            _stored_baseline(row, over_all_offsets(baseline).kl_interval(run.args.seed))
            for baseline, row in zip(baselines, rows, strict=True)
        ),
    )


def _stored_baseline(row: QualityRow, kl: statistics.Interval) -> BaselineRecord:
    return BaselineRecord(
        name=row.label,
        mean_bits=row.mean_bits,
        effective_bits=row.effective_bits,
        kl_mean=kl.mean,
        kl_low=kl.low,
        kl_high=kl.high,
    )


def _predicted_kl(run: SearchRun, found: SearchOutcome) -> float | None:
    """The additive prediction where it is in nats and known: a uniform without transforms may not have been scored."""
    predicted = predicted_score(found.configuration)
    return None if run.args.score == "e_o" or math.isnan(predicted) else predicted


def _provenance(run: SearchRun, found: SearchOutcome) -> Provenance:
    corpus = run.bench.corpus
    source = corpus_source(run.args, run.shape)
    counts = dict(zip(("calibrate", "select", "report"), source.num_sequences, strict=True))
    return Provenance(
        kvtuner_version=__version__,
        calibration=CalibrationRecord(
            corpus=source.name,
            token_ids_sha256=SplitHashes(**corpus.hashes()),
            num_sequences=SplitCounts(**counts),
            sequence_length=source.sequence_length,
            position_range=(0, run.shape.context_length - 1),
            seed=run.args.seed,
            score=run.args.score,
        ),
        search=None
        if found.study is None
        else SearchRecord(sampler=run.args.sampler, trials=len(found.study.trials), seed=run.args.seed),
        libraries=Libraries(**{name: importlib.metadata.version(name) for name in ("torch", "transformers", "optuna")}),
        command=run.command,
    )
