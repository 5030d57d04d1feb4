"""The report split: the winner beside uniforms and fp8, paired. Knows nothing of how the winner was found."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtuner.errors import NonFiniteActivationError
from kvtuner.evaluation.statistics import Interval, bootstrap_mean, paired_difference, quantile
from kvtuner.precision import PrecisionPair

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvtuner.calibration.batches import Offsets
    from kvtuner.calibration.forward.simulator import Simulator
    from kvtuner.calibration.kl import TokenScores
    from kvtuner.calibration.workbench import Workbench
    from kvtuner.evaluation.scheme import CacheScheme
    from kvtuner.run_folder import RunFolder

JOURNAL = "validation.jsonl"
OFFSETS: tuple[Offsets, Offsets] = ("small", "large")
UNIFORM_PAIRS = tuple(PrecisionPair.parse(text) for text in ("K8V8", "K8V4", "K4V4", "K4V2", "K2V2"))


@dataclass(frozen=True, slots=True)
class SequenceSums:
    """The results of one scheme at one kind of offsets: a sum per sequence.

    Attributes:
        kl: The sums of KL over scored tokens, nats.
        agree: The sums of top-1 agreement.
        nll: The sums of -log p(next token).
        count: The numbers of scored tokens.
        nll_count: The numbers of scored tokens that have a next token.
        kl_p99: The 99th percentile of KL over all scored tokens.
    """

    kl: tuple[float, ...]
    agree: tuple[float, ...]
    nll: tuple[float, ...]
    count: tuple[int, ...]
    nll_count: tuple[int, ...]
    kl_p99: float

    @classmethod
    def of(cls, scores: TokenScores) -> SequenceSums:
        """Sum token scores, [num_sequences, scored tokens], over tokens."""
        known = ~scores.nll.isnan()
        tokens = scores.kl.shape[1]
        return cls(
            kl=tuple(scores.kl.sum(dim=1).tolist()),
            agree=tuple(scores.agree.sum(dim=1).tolist()),
            nll=tuple(scores.nll.nan_to_num().sum(dim=1).tolist()),
            count=(tokens,) * scores.kl.shape[0],
            nll_count=tuple(known.sum(dim=1).tolist()),
            kl_p99=quantile(scores.kl.flatten().numpy(), 0.99),
        )

    def kl_interval(self, seed: int) -> Interval:
        """The mean KL per token with its bootstrap interval."""
        return bootstrap_mean(_floats(self.kl), _ints(self.count), seed=seed)

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
    return paired_difference(_floats(first.kl), _floats(second.kl), _ints(first.count), seed=seed)


def pooled(parts: Sequence[SequenceSums]) -> SequenceSums:
    """Add the results of the same sequences at several kinds of offsets, so that sequences stay what is resampled.

    The p99 is the largest of all parts.
    """

    def added(columns: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(sum(values) for values in zip(*columns, strict=True))

    return SequenceSums(
        kl=added([part.kl for part in parts]),
        agree=added([part.agree for part in parts]),
        nll=added([part.nll for part in parts]),
        count=tuple(int(n) for n in added([part.count for part in parts])),
        nll_count=tuple(int(n) for n in added([part.nll_count for part in parts])),
        kl_p99=max(part.kl_p99 for part in parts),
    )


def _floats(values: Sequence[float]) -> NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


def _ints(values: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)


class Validator:
    """Measures schemes on the report split; a result is journalled and never measured twice."""

    def __init__(self, bench: Workbench, folder: RunFolder, identity: str) -> None:
        """Measure on `bench`; reuse what `folder` holds under `identity`."""
        self._bench = bench
        self._folder = folder
        self._identity = identity
        self._simulators: dict[Offsets, Simulator] = {}
        self._known = self._journalled()

    def measure(
        self, scheme: CacheScheme, offsets: Offsets, on_batch: Callable[[int], None] | None = None
    ) -> SequenceSums:
        """Measure one scheme at one kind of position offsets, or look it up.

        Raises:
            NonFiniteActivationError: a token's KL is NaN or infinite; nothing is journalled.
        """
        key = (offsets, scheme.key)
        if key not in self._known:
            self._known = self._journalled()  # by another worker meanwhile
        if key in self._known:
            return self._known[key]
        if offsets not in self._simulators:
            self._simulators[offsets] = self._bench.simulator("report", offsets)
        scores = self._simulators[offsets].measure(scheme.specs, on_batch)
        if not bool(torch.isfinite(scores.kl).all()):
            raise NonFiniteActivationError(
                f"the KL of every token must be finite, but {scheme.name} has NaN or infinity at {offsets} position"
                " offsets of the report split; run the model in a wider dtype"
            )
        sums = SequenceSums.of(scores)
        record = {"identity": self._identity, "offsets": offsets, "key": scheme.key, "sums": asdict(sums)}
        self._folder.append(JOURNAL, record)
        self._known[key] = sums
        return sums

    def _journalled(self) -> dict[tuple[Offsets, str], SequenceSums]:
        return {
            (record["offsets"], record["key"]): _from_record(record["sums"])
            for record in self._folder.records(JOURNAL)
            if record.get("identity") == self._identity
        }


def _from_record(values: Mapping[str, list[float] | float]) -> SequenceSums:
    return SequenceSums(
        **{  # type: ignore[arg-type]  # a dict of the dataclass's own fields
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
    )
