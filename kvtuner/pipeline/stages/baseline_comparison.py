"""The winner of a target beside every baseline on the report split, and the uniform that may take its place."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvtuner.errors import NonFiniteActivationError
from kvtuner.evaluation.cache_scheme import CacheScheme, Fp8Scheme, UnquantizedScheme
from kvtuner.evaluation.validation import (
    COMPARED_PAIRS,
    OFFSETS,
    SequenceSums,
    Validator,
    kl_difference,
    pooled,
)
from kvtuner.exported_configs.verdict import LEAST_UNITS
from kvtuner.pipeline.progress import say
from kvtuner.progress.bar import ProgressBar
from kvtuner.report.search_data import ALL_OFFSETS, OffsetQuality, QualityRow
from kvtuner.tuner.objective import configuration_key, layer_specs
from kvtuner.tuner.uniform_table import largest_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.batches import Offsets
    from kvtuner.evaluation.statistics import Interval
    from kvtuner.pipeline.stages.budget_search import SearchOutcome
    from kvtuner.pipeline.stages.search_run import SearchRun
    from kvtuner.precision import PrecisionPair
    from kvtuner.search_spaces.space import Configuration

HAND_WRITTEN: Final = "hand-written"


class BaselineComparison:
    """The scheme of an outcome, the unquantized model and the baselines, measured on the report split.

    The best uniform takes the outcome's place where it is clearly better. Results are by key of scheme and kind of
    offsets.
    """

    def __init__(self, run: SearchRun, outcome: SearchOutcome, validator: Validator) -> None:
        self.run, self.outcome, self.winner = run, outcome, _winner(run, outcome)
        self.reference, *baselines = _baselines(run, _best_pair(run, outcome))
        self.measured = _measure_all(run, validator, [self.reference, self.winner], baselines)
        self.baselines = [baseline for baseline in baselines if baseline.key in self.measured]
        self.outcome = self._overridden()
        self.winner = _winner(run, self.outcome)
        # Nothing is run twice: the validator keeps what it measured.
        self.measured |= _measure_all(run, validator, [self.winner], [])

    def pooled(self, scheme: CacheScheme) -> SequenceSums:
        """The results of a scheme over all kinds of offsets."""
        return pooled(list(self.measured[scheme.key].values()))

    def winner_less(self, scheme: CacheScheme) -> Interval:
        """The paired difference over all kinds of offsets, the winner's KL less that of a scheme."""
        return kl_difference(self.pooled(self.winner), self.pooled(scheme), self.run.seed)

    @property
    def best_uniform(self) -> CacheScheme | None:
        """The fair rival: the uniform of least pooled KL inside the budget, with transforms where it has any."""
        uniforms = self._uniforms_inside()
        return min(uniforms, key=lambda scheme: sum(self.pooled(scheme).kl), default=None)

    def quality(self) -> tuple[OffsetQuality, ...]:
        """The winner beside its baselines over all kinds of offsets, and at each, as a report shows them."""
        run = self.run
        num_sequences, tokens = run.bench.corpus.splits["report"].shape
        context = run.shape.context_length
        small, large = f"0 to {tokens - 1}", f"{max(0, context - tokens)} to {max(context, tokens) - 1}"
        positions = {ALL_OFFSETS: f"{small} and {large}", "small": small, "large": large}
        return tuple(
            OffsetQuality(
                offsets=offsets,
                positions=where,
                reference_perplexity=self._sums(self.reference, offsets).perplexity,
                winner=self._row(self.winner, offsets),
                baselines=tuple(self._row(baseline, offsets) for baseline in self.baselines),
                num_sequences=num_sequences,
            )
            for offsets, where in positions.items()
        )

    def _sums(self, scheme: CacheScheme, offsets: str) -> SequenceSums:
        by_offsets = {str(kind): sums for kind, sums in self.measured[scheme.key].items()}
        return self.pooled(scheme) if offsets == ALL_OFFSETS else by_offsets[offsets]

    def _row(self, scheme: CacheScheme, offsets: str) -> QualityRow:
        sums, winner, seed = self._sums(scheme, offsets), self._sums(self.winner, offsets), self.run.seed
        effective = scheme.effective_bits
        assert effective is not None
        return QualityRow(
            name=scheme.name,
            transforms=scheme.has_transforms,
            mean_bits=scheme.mean_bits,
            effective_bits=effective,
            bytes_per_token=scheme.bytes_on(self.run.ranks),
            kl=sums.kl_interval(seed),
            kl_p99=sums.kl_p99,
            top1=sums.top1_agreement,
            perplexity=sums.perplexity,
            fits_budget=self.outcome.fits(scheme),
            difference=None if scheme is self.winner else kl_difference(sums, winner, seed),
        )

    def _uniforms_inside(self) -> list[CacheScheme]:
        """The uniforms that keep the budget and the pairs of layers that are kept."""
        return [
            scheme
            for scheme in self.baselines
            if len(set(scheme.pairs)) == 1
            and not isinstance(scheme, Fp8Scheme)
            and self.outcome.fits(scheme)
            and set(self.run.kept.values()) <= set(scheme.pairs)
        ]

    def _overridden(self) -> SearchOutcome:
        """The best uniform inside the budget instead of the winner, if the paired interval lies above zero.

        Layers that are kept stay as they are, and so does a nested family, and the winner on too few sequences.
        """
        run, outcome, baseline = self.run, self.outcome, self.best_uniform
        if outcome.study is None or run.options.nested or baseline is None:
            return outcome
        is_little = len(self.pooled(baseline).kl) < LEAST_UNITS
        if is_little or self.winner_less(baseline).low <= 0:
            return outcome
        name = f"{baseline.name} with transforms" if baseline.has_transforms else baseline.name
        say(f"uniform {name} beats the searched configuration on the report split and takes its place")
        run.folder.log("override", asked=outcome.asked, uniform=name)
        return replace(
            outcome,
            configuration=run.uniform(baseline.pairs[0], transforms=baseline.has_transforms),
            measured_kl=outcome.uniform_kl.get(baseline.pairs[0]) if baseline.has_transforms else None,
            uniform_name=baseline.name,
        )


def largest_uniforms(run: SearchRun, outcome: SearchOutcome) -> list[PrecisionPair]:
    """The uniform pairs that may be the best inside the budget, whose KL with transforms was measured whole."""
    schemes = {
        pair: scheme_of(run, str(pair), run.uniform(pair, transforms=True), transforms=True)
        for pair in outcome.uniform_kl
        if run.may_be_uniform(pair)
    }
    return largest_pairs([pair for pair, scheme in schemes.items() if outcome.fits(scheme)])


def _best_pair(run: SearchRun, outcome: SearchOutcome) -> PrecisionPair | None:
    """The uniform inside the budget that has the least KL with transforms on the select split."""
    uniforms = largest_uniforms(run, outcome)
    return min(uniforms, key=lambda pair: (outcome.uniform_kl[pair], str(pair)), default=None)


def _baselines(run: SearchRun, best: PrecisionPair | None) -> list[CacheScheme]:
    """The unquantized model, the best uniform pair with and without transforms, the usual pairs without, and fp8."""
    schemes: list[CacheScheme] = [UnquantizedScheme.of(run.shape.geometry)]
    for pair in dict.fromkeys([*COMPARED_PAIRS, *([] if best is None else [best])]):
        schemes.append(scheme_of(run, str(pair), run.uniform(pair, transforms=False), transforms=False))
    if best is not None:
        configuration = run.uniform(best, transforms=True)
        if any((c.k_transform, c.v_transform) != ("none", "none") for c in configuration):
            schemes.append(scheme_of(run, str(best), configuration, transforms=True))
    return [*schemes, Fp8Scheme.of(run.shape.geometry)]


def scheme_of(run: SearchRun, name: str, configuration: Configuration, *, transforms: bool) -> CacheScheme:
    """A configuration as a scheme under the run's group sizes; `transforms` is what a report says of it."""
    return CacheScheme(
        name=name,
        has_transforms=transforms,
        rows=run.rows,
        pairs=tuple(choice.pair for choice in configuration),
        specs=layer_specs(configuration, run.table, run.bench.options.quant),
        key=configuration_key(configuration),
    )


def _winner(run: SearchRun, outcome: SearchOutcome) -> CacheScheme:
    name = outcome.uniform_name or (HAND_WRITTEN if outcome.study is None else outcome.asked)
    return scheme_of(run, name, outcome.configuration, transforms=outcome.has_transforms)


def _measure_all(
    run: SearchRun, validator: Validator, needed: Sequence[CacheScheme], others: Sequence[CacheScheme]
) -> dict[str, dict[Offsets, SequenceSums]]:
    """Results by key of scheme, without those of `others` whose KL is not finite, which it says."""
    jobs = [(scheme, offsets) for offsets in OFFSETS for scheme in (*needed, *others)]
    with ProgressBar(total=len({(scheme.key, offsets) for scheme, offsets in jobs}), desc="validation") as bar:
        validator.measure_all(jobs, bar.update)
    measured: dict[str, dict[Offsets, SequenceSums]] = {scheme.key: {} for scheme in (*needed, *others)}
    for scheme, offsets in jobs:
        if scheme.key in measured:
            try:
                measured[scheme.key][offsets] = validator.measure(scheme, offsets)
            except NonFiniteActivationError as error:
                if any(scheme.key == other.key for other in needed):
                    raise
                run.leave_out(scheme.name, str(error))
                del measured[scheme.key]
    return measured
