"""KL of the whole model with one or both sides of every layer at one width. Knows nothing of what is compared by it."""

from __future__ import annotations

import math
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, Final

from kvtuner.calibration.forward.simulator import LayerSpec, Simulator
from kvtuner.calibration.workbench import IDENTITY_FILE
from kvtuner.run_folder import refuse_difference

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.calibration.sensitivity import LayerConstants
    from kvtuner.calibration.workbench import Workbench
    from kvtuner.precision import Side
    from kvtuner.run_folder import RunFolder

_SMALLEST_KL: Final = 1e-12


class WholeModelKL:
    """Measures the model on the calibrate split with all layers alike; loads nothing before it is asked."""

    def __init__(self, bench: Workbench, folder: RunFolder) -> None:
        self._bench, self._folder = bench, folder
        self._prepared: tuple[Simulator, dict[int, LayerConstants]] | None = None

    def measure(self, quant: QuantizationOptions, bits: int, sides: Sequence[Side]) -> list[float | None]:
        """The KL of every sequence, nats per token; None where it is not finite.

        Sides that are not named are exact, and the rotary channels beside a latent; others have the last of the
        transforms to choose from: of all, centred and balanced keys are rotated and values too, as in most layers of a
        profile.
        """
        if self._prepared is None:
            constants = self._bench.constants(self._folder)
            self._prepared = self._bench.simulator("calibrate"), constants
        simulator, constants = self._prepared
        sides = [side for side in sides if side in self._bench.chain.geometry.sides]
        specs = {}
        for layer, constant in constants.items():
            keys, values = (
                quant.spec(side, bits, constant.transform(side, quant.transform_names(side)[-1]))
                if side in sides
                else None
                for side in ("k", "v")
            )
            specs[layer] = LayerSpec(keys, values, quant.window)
        return [finite_or_none(kl) for kl in simulator.measure(specs).mean_kl.tolist()]


def mean_over_sequences(kls: Sequence[float | None]) -> float:
    """The geometric mean, since few sequences have most of the arithmetic mean; infinite where one is not finite."""
    finite = [max(kl, _SMALLEST_KL) for kl in kls if kl is not None]
    return math.inf if len(finite) < len(kls) else geometric_mean(finite)


def finite_or_none(value: float) -> float | None:
    """The value as JSON can hold it."""
    return value if math.isfinite(value) else None


def refuse_other_run(folder: RunFolder, identity: Mapping[str, Any], undecided: Collection[str]) -> None:
    """Refuse a folder that is bound to another run, whatever it holds of the facts that are still undecided."""
    if not folder.has(IDENTITY_FILE):
        return
    known, wanted = (
        {name: value for name, value in facts.items() if name not in undecided}
        for facts in (folder.read_checked(IDENTITY_FILE), identity)
    )
    refuse_difference(known, wanted, f"{folder.path} holds the measurements of another run")
