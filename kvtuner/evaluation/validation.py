"""The report split: the winner beside uniforms and fp8, paired. Knows nothing of how the winner was found."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtuner.errors import NonFiniteActivationError
from kvtuner.evaluation.cells import MeanScores
from kvtuner.journal import Journal
from kvtuner.precision import PrecisionPair
from kvtuner.workers.work_queue import share_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvtuner.calibration.batches import Offsets
    from kvtuner.calibration.forward.simulator import Simulator
    from kvtuner.calibration.kl import TokenScores
    from kvtuner.calibration.workbench import Workbench
    from kvtuner.evaluation.cache_scheme import CacheScheme
    from kvtuner.evaluation.statistics import Interval
    from kvtuner.exported_configs.profile.evaluation_record import Measure
    from kvtuner.geometry import ModelGeometry
    from kvtuner.run_folder import RunFolder

JOURNAL = "validation.jsonl"
OFFSETS: tuple[Offsets, Offsets] = ("small", "large")
UNIFORM_PAIRS = tuple(PrecisionPair.parse(text) for text in ("K8V8", "K8V4", "K4V4", "K3V3", "K4V2", "K2V2"))
"""The uniform pairs that tables of sizes show, as far as their widths are measured."""
COMPARED_PAIRS = tuple(PrecisionPair.parse(text) for text in ("K8V8", "K4V4"))
"""The uniform pairs without transforms that every winner is compared with, besides the best uniform in its budget."""


@dataclass(frozen=True, slots=True)
class SequenceSums:
    """The results of one scheme at one kind of offsets: a sum over scored tokens for each sequence.

    KL is in nats; `nll` is -log p(next token), over the `nll_count` tokens that have one; `kl_p99` is the 99th
    percentile of KL over all scored tokens.
    """

    kl: tuple[float, ...]
    agree: tuple[float, ...]
    nll: tuple[float, ...]
    count: tuple[int, ...]
    nll_count: tuple[int, ...]
    kl_p99: float

    @classmethod
    def of(cls, scores: TokenScores) -> SequenceSums:
        """Sum token scores over tokens."""
        return cls(
            kl=tuple(scores.kl.sum(dim=1).tolist()),
            agree=tuple(scores.agree.sum(dim=1).tolist()),
            nll=tuple(scores.nll.nan_to_num().sum(dim=1).tolist()),
            count=tuple(scores.counts.tolist()),
            nll_count=tuple((~scores.nll.isnan()).sum(dim=1).tolist()),
            kl_p99=float(np.quantile(scores.scored_kl().numpy(), 0.99, method="inverted_cdf")),  # the KL of a token
        )

    def means(self, measure: Measure) -> MeanScores:
        """The mean KL, top-1 agreement or negative log-likelihood of a token."""
        sums = {"kl_nats_per_token": self.kl, "top1_agreement": self.agree, "nll_nats_per_token": self.nll}[measure]
        counts = self.nll_count if measure == "nll_nats_per_token" else self.count
        return MeanScores(np.array(sums, dtype=np.float64), np.array(counts, dtype=np.int64))

    def kl_interval(self, seed: int) -> Interval:
        """The mean KL per token with its bootstrap interval."""
        return self.means("kl_nats_per_token").interval(seed)

    @property
    def top1_agreement(self) -> float:
        """The share of scored tokens whose most likely next token is the reference's."""
        return sum(self.agree) / sum(self.count)

    @property
    def perplexity(self) -> float:
        """The perplexity of the scored tokens that have a next token."""
        return math.exp(sum(self.nll) / sum(self.nll_count))


def kl_difference(first: SequenceSums, second: SequenceSums, seed: int) -> Interval:
    """The paired difference of mean KL, first minus second."""
    return first.means("kl_nats_per_token").minus(second.means("kl_nats_per_token"), seed)


def pooled(parts: Sequence[SequenceSums]) -> SequenceSums:
    """Add the results of the same sequences at several kinds of offsets, so that sequences stay what is resampled.

    The p99 is the largest of all parts.
    """
    columns = {
        name: tuple(sum(values) for values in zip(*(getattr(part, name) for part in parts), strict=True))
        for name in ("kl", "agree", "nll", "count", "nll_count")
    }
    return SequenceSums(**columns, kl_p99=max(part.kl_p99 for part in parts))


def uniform_pairs(widths: Collection[int], geometry: ModelGeometry) -> tuple[PrecisionPair, ...]:
    """The pairs of `UNIFORM_PAIRS` whose widths are measured; of latents, those that are one width."""
    pairs = (pair for pair in UNIFORM_PAIRS if {pair.k_bits, pair.v_bits} <= set(widths))
    return tuple(pair for pair in pairs if pair.k_bits == pair.v_bits or not geometry.is_latent)


class Validator:
    """Measures schemes on the report split, with other workers; a result is journalled and never measured twice.

    The identity is the hash of everything that decides a result besides scheme and offsets.
    """

    def __init__(self, bench: Workbench, folder: RunFolder, identity: str) -> None:
        self._bench, self._folder, self._identity = bench, folder, identity
        self._journal = Journal(folder, JOURNAL, identity, itemgetter("offsets", "key"))
        self._simulators: dict[Offsets, Simulator] = {}

    def measure_all(
        self, jobs: Sequence[tuple[CacheScheme, Offsets]], on_done: Callable[[object], object] | None = None
    ) -> None:
        """Measure schemes at kinds of offsets, or look them up, with other workers; `on_done` is called for each."""
        schemes = {scheme.key: scheme for scheme, _ in jobs}

        def measure(items: Sequence[tuple[Offsets, str]]) -> None:
            for offsets, key in items:
                self._measure(schemes[key], offsets)

        keys = [(offsets, scheme.key) for scheme, offsets in jobs]
        share_keys(self._folder, self._journal, JOURNAL, keys, measure, on_done, group_of=itemgetter(0))

    def measure(self, scheme: CacheScheme, offsets: Offsets) -> SequenceSums:
        """Measure one scheme, or look it up; a `NonFiniteActivationError` where its KL is no number."""
        self.measure_all([(scheme, offsets)])
        record = self._journal.record((offsets, scheme.key))
        if record["sums"] is None:
            raise NonFiniteActivationError(
                f"the KL of every token must be finite, but {scheme.name} has NaN or infinity at {offsets} position"
                " offsets of the report split; run the model in a wider dtype"
            )
        sums = record["sums"]
        return SequenceSums(**{name: tuple(sums[name]) for name in sums if name != "kl_p99"}, kl_p99=sums["kl_p99"])

    def _measure(self, scheme: CacheScheme, offsets: Offsets) -> None:
        if offsets not in self._simulators:
            self._simulators[offsets] = self._bench.simulator("report", offsets)
        scores = self._simulators[offsets].measure(scheme.specs)
        is_finite = bool(torch.isfinite(scores.kl).all())
        sums = asdict(SequenceSums.of(scores)) if is_finite else None
        self._journal.append({"offsets": offsets, "key": scheme.key, "sums": sums})
