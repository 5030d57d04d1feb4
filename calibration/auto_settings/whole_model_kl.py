"""KL of the whole model with one or both sides of every layer at one width. Knows nothing of what is compared by it."""

from __future__ import annotations

import math
from itertools import islice
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, Final

from kvtuner.calibration.forward.simulator import LayerSpec
from kvtuner.calibration.workbench import IDENTITY_FILE
from kvtuner.journal import Journal
from kvtuner.run_folder import refuse_difference, sha256_of
from kvtuner.workers.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.calibration.sensitivity import LayerConstants
    from kvtuner.calibration.workbench import Workbench
    from kvtuner.precision import Side
    from kvtuner.run_folder import RunFolder

_SMALLEST_KL: Final = 1e-12

Comparand = tuple[Any, ...]
"""The facts by which one way of storing the model differs from those that it is compared with, as JSON values."""
_Item = tuple[Comparand, int]
"""A comparand on a batch, by its place."""


class WholeModelKL:
    """Measures the model on the calibrate split with all layers alike, batch by batch with other workers.

    Loads nothing before something is missing in its journal.
    """

    def __init__(
        self,
        bench: Workbench,
        folder: RunFolder,
        journal: str,
        facts: Sequence[str],
        settings_of: Callable[[Comparand], tuple[QuantizationOptions, int, Sequence[Side]]],
    ) -> None:
        """Journal a comparand, which is the values of its `facts`, for each batch, with the KL of its sequences.

        `settings_of` gives its quantizer, its width, and the sides that have it.
        """
        self._bench, self._folder, self._facts, self._settings_of = bench, folder, facts, settings_of
        self._journal = Journal(folder, journal, sha256_of(bench.identity()), self._item_of)
        self._simulator = bench.simulator("calibrate")

    def of_each_sequence(self, comparands: Sequence[Comparand]) -> dict[Comparand, list[float | None]]:
        """The KL of every sequence under each, nats per token; None where it is not finite."""
        places = range(len(self._simulator.batches))
        items = [(comparand, place) for comparand in comparands for place in places]
        if any(self._journal.get(item) is None for item in items):
            self._finish(items)
        return {
            comparand: [kl for place in places for kl in self._journal.record((comparand, place))["kl"]]
            for comparand in comparands
        }

    def measure(
        self,
        quant: QuantizationOptions,
        bits: int,
        sides: Sequence[Side],
        constants: Mapping[int, LayerConstants],
        places: Sequence[int],
    ) -> list[float]:
        """The KL of every sequence of the batches at these places, nats per token.

        Sides that are not named are exact, and the rotary channels beside a latent; others have the last of the
        transforms to choose from: of all, centred and balanced keys are rotated and values too, as in most layers of a
        profile.
        """
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
        kls: list[float] = self._simulator.measure(specs, places=places).mean_kl.tolist()
        return kls

    def _finish(self, items: Sequence[_Item]) -> None:
        constants, batches = self._bench.constants(self._folder), self._simulator.batches

        def measure(taken: Sequence[_Item]) -> None:
            for comparand in dict.fromkeys(comparand for comparand, _ in taken):
                places = [place for other, place in taken if other == comparand]
                kls = iter(self.measure(*self._settings_of(comparand), constants, places))
                facts = dict(zip(self._facts, comparand, strict=True))
                of_places = [list(islice(kls, len(batches[place].input_ids))) for place in places]
                self._journal.append(
                    *(
                        {**facts, "batch": place, "kl": list(map(finite_or_none, own))}
                        for place, own in zip(places, of_places, strict=True)
                    )
                )

        WorkQueue[_Item](
            self._journal,
            measure=measure,
            group_of=lambda item: item[1],
            held_groups=self._simulator.prepared_batches,
            at_once=min(self._simulator.num_at_once, len(batches)),
            at_once_alone=len(batches),
        ).finish(items)

    def _item_of(self, record: Mapping[str, Any]) -> _Item:
        # A line of all batches, which an edition before wrote, is that of no item.
        return tuple(record[name] for name in self._facts), record.get("batch", -1)


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
