"""Measured KL of assembled configurations on the select split, journalled. Knows nothing of budgets or samplers."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Final

from kvtuner.calibration.simulate import LayerSpec
from kvtuner.errors import NonFiniteActivationError
from kvtuner.precision import NATIVE_BITS
from kvtuner.quant import QuantSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.calibration.measure import QuantOptions
    from kvtuner.calibration.sensitivity import SensitivityTable, Side
    from kvtuner.calibration.simulate import Simulator
    from kvtuner.run_folder import RunFolder
    from kvtuner.search_spaces.space import Choice

JOURNAL: Final = "measured.jsonl"
MARGINS: Final = (1.4, 1.2)
"""How many times the best one's KL ends a measurement after a third and after two thirds of the sequences."""


def describe(configuration: Sequence[Choice]) -> str:
    """A configuration as text that says everything it decides: ``K4:hadamard V2:none, ...``."""
    return ", ".join(
        f"K{choice.pair.k_bits}:{choice.k_transform} V{choice.pair.v_bits}:{choice.v_transform}"
        for choice in configuration
    )


def layer_specs(
    configuration: Sequence[Choice], table: SensitivityTable, options: QuantOptions
) -> Mapping[int, LayerSpec]:
    """What a simulator needs to know of a configuration."""

    def spec(layer: int, side: Side, bits: int, transform: str) -> QuantSpec | None:
        if bits == NATIVE_BITS:
            return None
        constants = table.constants_of(layer, side, transform)
        return QuantSpec(bits, constants, options.group_size(side), options.symmetric)

    return {
        layer: LayerSpec(
            spec(layer, "k", choice.pair.k_bits, choice.k_transform),
            spec(layer, "v", choice.pair.v_bits, choice.v_transform),
        )
        for layer, choice in enumerate(configuration)
    }


class MeasuredKL:
    """Mean KL per scored token of a configuration, nats; no sequence is run twice for it in a run folder."""

    def __init__(
        self,
        simulator: Simulator,
        table: SensitivityTable,
        options: QuantOptions,
        folder: RunFolder,
        identity: str,
    ) -> None:
        """Measure with `simulator`; reuse what `folder` holds under `identity`."""
        self._simulator = simulator
        self._table = table
        self._options = options
        self._folder = folder
        self._identity = identity
        self._stages = _stages(len(simulator.prepared))
        self.num_sequences = 0
        """Sequences that the values given so far are means of, run for them now or before."""
        self._known = self._journalled()

    def __call__(self, configuration: Sequence[Choice]) -> float:
        """Measure, or look up, one configuration on all sequences.

        Raises:
            NonFiniteActivationError: the KL is NaN or infinite; nothing is journalled.
        """
        found = self._sequences(configuration)
        self.num_sequences += len(found)
        return fmean(found)

    def against(self, configuration: Sequence[Choice], best: Sequence[Choice]) -> float:
        """The same, but of a configuration that soon turns out to be clearly worse than `best` only an estimate.

        After a third and two thirds of the batches, one whose KL is beyond `MARGINS` times that of `best` on the same
        sequences is not measured further: it gets that many times the KL of `best`.

        Raises:
            NonFiniteActivationError: as for a whole measurement.
        """
        rival = self._sequences(best)
        found: list[float] = []
        for stage, margin in enumerate(MARGINS[: len(self._stages) - 1]):
            found += self._stage(configuration, stage)
            so_far = sum(rival[: len(found)])
            if sum(found) > margin * so_far > 0:
                self.num_sequences += len(found)
                return fmean(rival) * sum(found) / so_far
        return self(configuration)

    def _sequences(self, configuration: Sequence[Choice]) -> list[float]:
        """Mean KL of every sequence."""
        return [kl for stage in range(len(self._stages)) for kl in self._stage(configuration, stage)]

    def _stage(self, configuration: Sequence[Choice], stage: int) -> list[float]:
        """Mean KL of every sequence of one stage."""
        key = (describe(configuration), stage)
        if key not in self._known:
            self._known = self._journalled()  # by another worker meanwhile
        if key not in self._known:
            specs = layer_specs(configuration, self._table, self._options)
            found = self._simulator.measure(specs, batches=self._stages[stage]).kl.mean(dim=1).tolist()
            for kl in found:
                if not math.isfinite(kl):
                    pairs = ", ".join(str(choice.pair) for choice in configuration)
                    raise NonFiniteActivationError(
                        f"a measured KL must be finite, but is {kl} ({pairs}); run the model in a wider dtype"
                    )
            record = {"identity": self._identity, "configuration": key[0], "stage": stage, "kl": found}
            self._folder.append(JOURNAL, record)
            self._known[key] = found
        return self._known[key]

    def _journalled(self) -> dict[tuple[str, int], list[float]]:
        return {
            (record["configuration"], record["stage"]): record["kl"]
            for record in self._folder.records(JOURNAL)
            if record.get("identity") == self._identity
        }


def _stages(num_batches: int) -> list[slice]:
    """Batches cut into as many parts as there are margins and one, or fewer; none is empty, and none is split."""
    parts = min(len(MARGINS) + 1, num_batches)
    bounds = [num_batches * part // parts for part in range(parts + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]
