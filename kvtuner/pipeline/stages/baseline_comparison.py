"""The winner of a target beside every baseline on the report split, and the uniform that may take its place."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tqdm import tqdm

from kvtuner.errors import NonFiniteActivationError
from kvtuner.evaluation.cache_scheme import CacheScheme, Fp8Scheme, UnquantizedScheme
from kvtuner.evaluation.validation import OFFSETS, SequenceSums, Validator, kl_difference, pooled, uniform_pairs
from kvtuner.pipeline.progress import say
from kvtuner.report.search_data import OffsetQuality, QualityRow
from kvtuner.tuner.objective import configuration_key, layer_specs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.batches import Offsets
    from kvtuner.pipeline.stages.budget_search import SearchOutcome
    from kvtuner.pipeline.stages.search_run import SearchRun
    from kvtuner.search_spaces.space import Configuration

HAND_WRITTEN: Final = "hand-written"


class BaselineComparison:
    """The scheme of an outcome, the unquantized model and the baselines, measured on the report split.

    The best uniform takes the outcome's place where it is clearly better. Results are by key of scheme and kind of
    offsets.
    """

    def __init__(self, run: SearchRun, outcome: SearchOutcome, validator: Validator) -> None:
        self.run, self.outcome, self.winner = run, outcome, _winner(run, outcome)
        self.reference, *baselines = _baselines(run)
        self.measured = _measure_all(run, validator, [self.reference, self.winner], baselines)
        self.baselines = [baseline for baseline in baselines if baseline.key in self.measured]
        self.outcome = self._overridden()
        self.winner = _winner(run, self.outcome)
        # Nothing is run twice: the validator keeps what it measured.
        self.measured |= _measure_all(run, validator, [self.winner], [])

    def pooled(self, scheme: CacheScheme) -> SequenceSums:
        """The results of a scheme over all kinds of offsets."""
        return pooled(list(self.measured[scheme.key].values()))

    def quality(self) -> tuple[OffsetQuality, ...]:
        """The winner beside its baselines at each kind of offsets, as a report shows them."""
        run = self.run
        tokens, context = run.bench.corpus.splits["report"].shape[1], run.shape.context_length
        positions: dict[Offsets, str] = {
            "small": f"0 to {tokens - 1}",
            "large": f"{max(0, context - tokens)} to {max(context, tokens) - 1}",
        }
        return tuple(
            OffsetQuality(
                offsets=offsets,
                positions=positions[offsets],
                reference_perplexity=self.measured[self.reference.key][offsets].perplexity,
                winner=self._row(self.winner, offsets),
                baselines=tuple(self._row(baseline, offsets) for baseline in self.baselines),
            )
            for offsets in OFFSETS
        )

    def _row(self, scheme: CacheScheme, offsets: Offsets) -> QualityRow:
        sums, winner, seed = self.measured[scheme.key][offsets], self.measured[self.winner.key][offsets], self.run.seed
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

    def _overridden(self) -> SearchOutcome:
        """The best uniform inside the budget instead of the winner, if the paired interval excludes zero.

        Layers that are kept stay as they are, and so does a nested family.
        """
        run, outcome = self.run, self.outcome
        uniforms = set(map(str, uniform_pairs(run.table.widths)))
        allowed = [
            scheme
            for scheme in self.baselines
            if scheme.name in uniforms
            and outcome.fits(scheme)
            and all(scheme.pairs[layer] == pair for layer, pair in run.kept.items())
        ]
        if outcome.study is None or run.options.nested or not allowed:
            return outcome
        baseline = min(allowed, key=lambda scheme: sum(self.pooled(scheme).kl))
        if kl_difference(self.pooled(self.winner), self.pooled(baseline), run.seed).low <= 0:
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


def _baselines(run: SearchRun) -> list[CacheScheme]:
    schemes: list[CacheScheme] = [UnquantizedScheme.of(run.shape.geometry)]
    for transforms in (False, True):
        for pair in uniform_pairs(run.table.widths):
            configuration = run.uniform(pair, transforms=transforms)
            if transforms and all(c.k_transform == c.v_transform == "none" for c in configuration):
                continue
            schemes.append(scheme_of(run, str(pair), configuration, transforms=transforms))
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
    transforms = outcome.uniform_name is not None and outcome.has_transforms
    return scheme_of(run, name, outcome.configuration, transforms=transforms)


def _measure_all(
    run: SearchRun, validator: Validator, needed: Sequence[CacheScheme], others: Sequence[CacheScheme]
) -> dict[str, dict[Offsets, SequenceSums]]:
    """Results by key of scheme, without those of `others` whose KL is not finite, which it says."""
    measured: dict[str, dict[Offsets, SequenceSums]] = {scheme.key: {} for scheme in (*needed, *others)}
    jobs = [(scheme, offsets) for offsets in OFFSETS for scheme in (*needed, *others)]
    for scheme, offsets in tqdm(jobs, desc="validation", disable=None):
        if scheme.key in measured:
            try:
                measured[scheme.key][offsets] = validator.measure(scheme, offsets)
            except NonFiniteActivationError as error:
                if any(scheme.key == other.key for other in needed):
                    raise
                run.leave_out(scheme.name, str(error))
                del measured[scheme.key]
    return measured
