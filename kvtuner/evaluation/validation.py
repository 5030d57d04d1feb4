"""The report split: the winner beside uniforms and fp8, paired. Knows nothing of how the winner was found."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvtuner.errors import NonFiniteActivationError
from kvtuner.evaluation.cells import MeanScores
from kvtuner.journal import Journal
from kvtuner.precision import PrecisionPair
from kvtuner.workers.work_queue import WorkQueue

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
SUMS: Final = ("kl", "agree", "nll", "count", "nll_count")
"""What is summed over the scored tokens of each sequence."""
UNIFORM_PAIRS = tuple(PrecisionPair.parse(text) for text in ("K8V8", "K8V4", "K4V4", "K3V3", "K4V2", "K2V2"))
"""The uniform pairs that tables of sizes show, as far as their widths are measured."""
COMPARED_PAIRS = tuple(PrecisionPair.parse(text) for text in ("K8V8", "K4V4"))
"""The uniform pairs without transforms that every winner is compared with, besides the best uniform in its budget."""


@dataclass(frozen=True, slots=True)
class BatchSums:
    """The results of one scheme on one batch: a sum over scored tokens for each sequence.

    KL is in nats; `nll` is -log p(next token), over the `nll_count` tokens that have one. `largest_kl` holds the tokens
    with the largest KL, as many as the 99th percentile of all batches needs.
    """

    kl: tuple[float, ...]
    agree: tuple[float, ...]
    nll: tuple[float, ...]
    count: tuple[int, ...]
    nll_count: tuple[int, ...]
    largest_kl: tuple[float, ...]

    @classmethod
    def of(cls, scores: TokenScores, num_tokens: int) -> BatchSums:
        """Sum token scores over tokens; all batches together have so many."""
        kl = scores.scored_kl()
        return cls(
            kl=tuple(scores.kl.sum(dim=1).tolist()),
            agree=tuple(scores.agree.sum(dim=1).tolist()),
            nll=tuple(scores.nll.nan_to_num().sum(dim=1).tolist()),
            count=tuple(scores.counts.tolist()),
            nll_count=tuple((~scores.nll.isnan()).sum(dim=1).tolist()),
            largest_kl=tuple(kl.sort(descending=True).values[: num_tokens // 100 + 2].tolist()),
        )


@dataclass(frozen=True, slots=True)
class SequenceSums:
    """The results of one scheme at one kind of offsets: a sum over scored tokens for each sequence, as of batches.

    `kl_p99` is the 99th percentile of KL over all scored tokens.
    """

    kl: tuple[float, ...]
    agree: tuple[float, ...]
    nll: tuple[float, ...]
    count: tuple[int, ...]
    nll_count: tuple[int, ...]
    kl_p99: float

    @classmethod
    def of(cls, parts: Sequence[BatchSums]) -> SequenceSums:
        """The results of several batches as one."""
        columns = {name: tuple(chain.from_iterable(getattr(part, name) for part in parts)) for name in SUMS}
        kl = np.zeros(sum(columns["count"]))  # of tokens; what is less than the largest of a batch is as good as zero
        largest = [value for part in parts for value in part.largest_kl]
        kl[: len(largest)] = largest
        p99 = float(np.quantile(kl, 0.99, method="inverted_cdf"))  # the KL of a token
        return cls(**columns, kl_p99=p99)

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
        for name in SUMS
    }
    return SequenceSums(**columns, kl_p99=max(part.kl_p99 for part in parts))


def uniform_pairs(widths: Collection[int], geometry: ModelGeometry) -> tuple[PrecisionPair, ...]:
    """The pairs of `UNIFORM_PAIRS` whose widths are measured; of latents, those that are one width."""
    pairs = (pair for pair in UNIFORM_PAIRS if {pair.k_bits, pair.v_bits} <= set(widths))
    return tuple(pair for pair in pairs if pair.k_bits == pair.v_bits or not geometry.is_latent)


_Item = tuple["Offsets", str, int]
"""A kind of offsets, the key of a scheme, and a batch by its place."""


class Validator:
    """Measures schemes on the report split, with other workers, batch by batch; none is measured twice.

    The identity is the hash of everything that decides a result besides scheme, offsets and batch.
    """

    def __init__(self, bench: Workbench, folder: RunFolder, identity: str) -> None:
        self._bench = bench
        self._journal = Journal(folder, JOURNAL, identity, itemgetter("offsets", "key", "batch"))
        self._simulators: dict[Offsets, Simulator] = {}
        self._prepared: set[tuple[Offsets, int]] = set()

    def measure_all(
        self, jobs: Sequence[tuple[CacheScheme, Offsets]], on_done: Callable[[], object] | None = None
    ) -> None:
        """Measure schemes at kinds of offsets, or look them up, with other workers; `on_done` is called for each."""
        schemes = {scheme.key: scheme for scheme, _ in jobs}
        left = {(offsets, scheme.key): len(self._simulator(offsets).batches) for scheme, offsets in jobs}
        most = max(left.values(), default=1)  # one scheme's batches run together, and not those of several

        def measure(items: Sequence[_Item]) -> None:
            for offsets, key in dict.fromkeys((offsets, key) for offsets, key, _ in items):
                places = [place for *job, place in items if job == [offsets, key]]
                self._measure(schemes[key], offsets, places)

        def tell(item: _Item) -> None:
            offsets, key, _ = item
            left[offsets, key] -= 1
            if on_done is not None and not left[offsets, key]:
                on_done()

        WorkQueue[_Item](
            self._journal,
            measure=measure,
            group_of=lambda item: (item[0], item[2]),
            held_groups=self._prepared,
            at_once=min(most, max((self._simulator(offsets).num_at_once for offsets, _ in left), default=1)),
            at_once_alone=most,
        ).finish([(*job, place) for job, count in left.items() for place in range(count)], on_done=tell)

    def measure(self, scheme: CacheScheme, offsets: Offsets) -> SequenceSums:
        """Measure one scheme, or look it up; a `NonFiniteActivationError` where its KL is no number."""
        self.measure_all([(scheme, offsets)])
        places = range(len(self._simulator(offsets).batches))
        records = [self._journal.record((offsets, scheme.key, place)) for place in places]
        if any(record["sums"] is None for record in records):
            raise NonFiniteActivationError(
                f"the KL of every token must be finite, but {scheme.name} has NaN or infinity at {offsets} position"
                " offsets of the report split; run the model in a wider dtype"
            )
        parts = ({name: tuple(values) for name, values in record["sums"].items()} for record in records)
        return SequenceSums.of([BatchSums(**part) for part in parts])

    def _simulator(self, offsets: Offsets) -> Simulator:
        if offsets not in self._simulators:
            self._simulators[offsets] = self._bench.simulator("report", offsets)
        return self._simulators[offsets]

    def _measure(self, scheme: CacheScheme, offsets: Offsets, places: Sequence[int]) -> None:
        simulator = self._simulator(offsets)
        num_tokens = sum(len(b.input_ids) * len(b.scored_places(simulator.plan)) for b in simulator.batches)
        scores = simulator.measure(scheme.specs, places=places)
        self._prepared.update((offsets, place) for place in places)
        parts = scores.split([len(simulator.batches[place].input_ids) for place in places])
        records = []
        for place, part in zip(places, parts, strict=True):
            is_finite = bool(torch.isfinite(part.kl).all())
            sums = asdict(BatchSums.of(part, num_tokens)) if is_finite else None
            records.append({"offsets": offsets, "key": scheme.key, "batch": place, "sums": sums})
        self._journal.append(*records)
