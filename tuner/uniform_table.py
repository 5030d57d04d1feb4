"""KL of every uniform pair of widths, most of them estimated from a quarter of the sequences.

Knows no models and no budgets: which pairs keep a budget is given.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from kvtuner.errors import NonFiniteActivationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kvtuner.precision import PrecisionPair
    from kvtuner.search_spaces.space import Configuration
    from kvtuner.tuner.objective import MeasuredKL

FIRST_PART: Final = 4
"""All pairs are measured on one of so many parts of the sequences."""


def largest_pairs(pairs: Collection[PrecisionPair]) -> list[PrecisionPair]:
    """The pairs to which no other one gives more bits: of those inside a budget, the ones that may be the best."""
    return [
        pair
        for pair in pairs
        if not any(pair != other and pair.k_bits <= other.k_bits and pair.v_bits <= other.v_bits for other in pairs)
    ]


def measure_uniforms(
    objective: MeasuredKL,
    uniforms: Mapping[PrecisionPair, Configuration],
    inside: Sequence[Collection[PrecisionPair]],
    *,
    on_ahead: Callable[[int], object] | None = None,
    on_batch: Callable[[object], object] | None = None,
    on_failure: Callable[[PrecisionPair, str], object] | None = None,
) -> dict[PrecisionPair, float]:
    """The KL of uniform pairs on all sequences, nats per token; of most of them an estimate.

    All pairs are measured on the first quarter of the sequences, and the largest of each budget on all of them: taking
    it that more bits lower KL, the best uniform is among these. What the others have on the first quarter is multiplied
    by what the sum over the largest grows by. A few sequences may have most of a KL, so estimates decide nothing.

    Args:
        objective: measures configurations, or looks them up.
        uniforms: the configuration of each pair.
        inside: the pairs that keep a budget, for each budget.
        on_ahead: called with a number of measurements before they begin.
        on_batch: called after every measurement.
        on_failure: called with a pair whose KL is not finite, and the reason; that one has no value.
    """

    def finite(
        pairs: Collection[PrecisionPair], measure: Callable[[Configuration], float]
    ) -> dict[PrecisionPair, float]:
        found = {}
        for pair in pairs:
            try:
                found[pair] = measure(uniforms[pair])
            except NonFiniteActivationError as error:
                if on_failure is not None:
                    on_failure(pair, str(error))
        return found

    def measure_all(configurations: Collection[Configuration], num_batches: int) -> None:
        if on_ahead is not None:
            on_ahead(len(configurations) * num_batches)
        objective.measure_all(list(configurations), num_batches, on_batch)

    num_batches = objective.part(FIRST_PART)
    measure_all(uniforms.values(), num_batches)
    first = finite(uniforms, partial(objective.on_first, num_batches=num_batches))
    measured: dict[PrecisionPair, float] = {}
    # A pair whose KL is not finite later on leaves its place to those below it.
    while largest := {
        pair: uniforms[pair]
        for pairs in inside
        for pair in largest_pairs([pair for pair in pairs if pair in first])
        if pair not in measured
    }:
        measure_all(largest.values(), objective.num_batches)
        found = finite(largest, objective)
        measured |= found
        first = {pair: kl for pair, kl in first.items() if pair in found or pair not in largest}
    on_first = sum(first[pair] for pair in measured)
    growth = sum(measured.values()) / on_first if on_first > 0 else 1.0
    return {pair: measured.get(pair, growth * kl) for pair, kl in first.items()}
