"""Measured KL of assembled configurations on the select split, journalled. Knows nothing of budgets or samplers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvtuner.calibration.simulate import LayerSpec, Simulator
from kvtuner.errors import NonFiniteActivationError
from kvtuner.precision import NATIVE_BITS
from kvtuner.quant import QuantSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.calibration.measure import QuantOptions
    from kvtuner.calibration.sensitivity import SensitivityTable, Side
    from kvtuner.run_folder import RunFolder
    from kvtuner.search_spaces.space import Choice

JOURNAL = "measured.jsonl"


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
    """Mean KL per scored token of a configuration, nats; each configuration is measured once per run folder."""

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
        self.num_measured = 0
        self._known = self._journalled()

    def __call__(self, configuration: Sequence[Choice]) -> float:
        """Measure, or look up, one configuration.

        Raises:
            NonFiniteActivationError: the KL is NaN or infinite; nothing is journalled.
        """
        key = describe(configuration)
        if key not in self._known:
            self._known = self._journalled()  # by another worker meanwhile
        if key not in self._known:
            kl = self._simulator.kl(layer_specs(configuration, self._table, self._options))
            if not math.isfinite(kl):
                pairs = ", ".join(str(choice.pair) for choice in configuration)
                raise NonFiniteActivationError(
                    f"a measured KL must be finite, but is {kl} ({pairs}); run the model in a wider dtype"
                )
            self._folder.append(JOURNAL, {"identity": self._identity, "configuration": key, "kl": kl})
            self._known[key] = kl
            self.num_measured += 1
        return self._known[key]

    def _journalled(self) -> dict[str, float]:
        return {
            record["configuration"]: record["kl"]
            for record in self._folder.records(JOURNAL)
            if record.get("identity") == self._identity
        }
