"""The measured KL of configurations on the select split, journalled. Knows nothing of budgets or samplers."""

from __future__ import annotations

import math
from operator import itemgetter
from statistics import fmean
from typing import TYPE_CHECKING, Final

from kvtuner.calibration.forward.simulator import LayerSpec
from kvtuner.errors import NonFiniteActivationError
from kvtuner.journal import Journal
from kvtuner.precision import PrecisionPair
from kvtuner.workers.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtuner.calibration.forward.simulator import Simulator
    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.calibration.sensitivity import SensitivityTable
    from kvtuner.run_folder import RunFolder
    from kvtuner.search_spaces.space import LayerChoice

JOURNAL: Final = "measured.jsonl"
REQUESTS: Final = "requests.jsonl"
"""The configurations that a worker is measuring, for others to help."""
RACE: Final = ((6, 1.4), (3, 1.2), (2, 1.05))
"""Pairs of a part and a margin: after 1/part of the sequences a measurement ends whose KL exceeds margin x the best."""


def configuration_key(configuration: Sequence[LayerChoice]) -> str:
    """A configuration as text that says everything it decides: ``K4:hadamard V2:none, ...``."""
    return ", ".join(
        f"K{choice.pair.k_bits}:{choice.k_transform} V{choice.pair.v_bits}:{choice.v_transform}"
        for choice in configuration
    )


def layer_specs(
    configuration: Sequence[LayerChoice], table: SensitivityTable, options: QuantizationOptions
) -> Mapping[int, LayerSpec]:
    """The storage of every layer of a configuration, as a simulator takes it."""
    return {
        layer: _layer_spec(layer, (choice.pair, choice.k_transform, choice.v_transform), table, options)
        for layer, choice in zip(table.geometry.ids, configuration, strict=True)
    }


def _layer_spec(
    layer: int, stored: tuple[PrecisionPair, str, str], table: SensitivityTable, options: QuantizationOptions
) -> LayerSpec:
    pair, k_transform, v_transform = stored
    keys = options.spec("k", pair.k_bits, table.constants_of(layer, "k", k_transform))
    if table.geometry.is_latent:  # beside which rotary channels stay exact
        return LayerSpec(keys, None, options.window)
    values = options.spec("v", pair.v_bits, table.constants_of(layer, "v", v_transform))
    return LayerSpec(keys, values, options.window)


def _parts_of(key: str) -> list[tuple[str, str, str]]:
    """The pair and both transforms of every layer, of a `configuration_key`."""
    parts = []
    for layer in key.split(", "):
        (k, k_transform), (v, v_transform) = (side.split(":") for side in layer.split(" "))
        parts.append((k + v, k_transform, v_transform))
    return parts


_Measurement = tuple[str, int]
"""A configuration, by its key, on a batch, by its place."""


class MeasuredKL:
    """The mean KL per scored token of a configuration, nats; what a run folder holds of it is not run again.

    Workers of the folder share the batches of a configuration: those that come to the same one, and those that `help`.
    """

    def __init__(
        self,
        simulator: Simulator,
        table: SensitivityTable,
        options: QuantizationOptions,
        folder: RunFolder,
        identity: str,
    ) -> None:
        """Measure with `simulator`; reuse what `folder` holds under `identity`."""
        self._simulator = simulator
        self._table = table
        self._options = options
        self._specs: dict[tuple[int, str], LayerSpec] = {}
        sizes = [len(batch.input_ids) for batch in simulator.batches]
        self.num_batches = len(sizes)
        # The margin by the number of batches after which it is applied; with few batches the later one takes its place.
        margins = {self.part(part): margin for part, margin in RACE}
        margins.pop(len(sizes), None)  # after the last batch nothing is left to save
        self._margins = list(margins.items())
        self.num_sequences = 0
        """The number of sequences that all returned values together are means of."""
        self._journal = Journal(folder, JOURNAL, identity, itemgetter("configuration", "batch"))
        self._requests = Journal(folder, REQUESTS, identity)
        self._requested: dict[_Measurement, None] = {}
        self._queue = WorkQueue[_Measurement](
            self._journal,
            measure=self._measure,
            group_of=lambda item: item[1],
            held_groups=simulator.prepared_batches,
            at_once=min(simulator.num_at_once, len(sizes)),
            at_once_alone=len(sizes),
        )

    def __call__(self, configuration: Sequence[LayerChoice]) -> float:
        """Measure, or look up, one configuration on all sequences.

        Raises:
            NonFiniteActivationError: The KL is NaN or infinite.
        """
        return fmean(self.of_each_sequence(configuration))

    def of_each_sequence(self, configuration: Sequence[LayerChoice]) -> list[float]:
        """The same without the mean: the KL of every sequence in turn."""
        kls = self._sequence_kls(configuration, self.num_batches)
        self.num_sequences += len(kls)
        return kls

    def against(self, configuration: Sequence[LayerChoice], best: Sequence[LayerChoice]) -> float:
        """Measure one configuration, but only estimate one that soon turns out to be clearly worse than `best`.

        After each part of `RACE` the ratio of its KL to that of `best` on the same sequences is compared with the
        margin. Beyond the margin it is not measured further: its value is that ratio times the KL of `best`. What other
        calls have measured of it makes no difference.

        Raises:
            NonFiniteActivationError: The KL is NaN or infinite.
        """
        best_kls = self._sequence_kls(best, self.num_batches)
        for num_batches, margin in self._margins:
            kls = self._sequence_kls(configuration, num_batches)
            best_so_far = sum(best_kls[: len(kls)])
            if sum(kls) > margin * best_so_far > 0:
                self.num_sequences += len(kls)
                return fmean(best_kls) * sum(kls) / best_so_far
        return self(configuration)

    def part(self, parts: int) -> int:
        """The number of batches in one of so many parts of them, rounded up."""
        return -(-self.num_batches // parts)

    def on_first(self, configuration: Sequence[LayerChoice], num_batches: int) -> float:
        """The mean KL on the sequences of the first batches alone.

        Raises:
            NonFiniteActivationError: The KL is NaN or infinite.
        """
        return fmean(self._sequence_kls(configuration, num_batches))

    def measure_all(
        self,
        configurations: Sequence[Sequence[LayerChoice]],
        num_batches: int,
        on_done: Callable[[object], object] | None = None,
    ) -> None:
        """Measure several configurations on the first batches, which workers share; `on_done` is called for each."""
        keys = dict.fromkeys(map(configuration_key, configurations))
        self._queue.finish([(key, place) for key in keys for place in range(num_batches)], on_done=on_done)

    def help(self) -> bool:
        """Measure something of what another worker has asked for; False where nothing is left to take."""
        for record in self._requests.unread():
            self._requested |= dict.fromkeys((record["configuration"], place) for place in range(record["batches"]))
        self._journal.refresh()
        self._requested = {item: None for item in self._requested if self._journal.known(item) is None}
        return self._queue.take_some(self._requested)

    def _sequence_kls(self, configuration: Sequence[LayerChoice], num_batches: int) -> list[float]:
        """The mean KL of every sequence of the first batches."""
        key = configuration_key(configuration)
        items = [(key, place) for place in range(num_batches)]
        if not self._queue.is_alone and any(self._journal.get(item) is None for item in items):
            self._requests.append({"key": key, "configuration": key, "batches": num_batches})
        self._queue.finish(items)
        kls: list[float] = []
        for item in items:
            record = self._journal.record(item)
            if record["kl"] is None:
                raise NonFiniteActivationError(record["reason"])
            kls += record["kl"]
        return kls

    def _measure(self, items: Sequence[_Measurement]) -> None:
        for key in dict.fromkeys(key for key, _ in items):
            places = [place for other, place in items if other == key]
            specs = {
                layer: self._spec(layer, PrecisionPair.parse(pair), *transforms)
                for layer, (pair, *transforms) in zip(self._table.geometry.ids, _parts_of(key), strict=True)
            }
            kls: list[float] = self._simulator.measure(specs, places=places).mean_kl.tolist()
            records = []
            for place in places:
                own = [kls.pop(0) for _ in self._simulator.batches[place].input_ids]
                reason = None if all(map(math.isfinite, own)) else self._reason(key, specs, place, own)
                records.append(
                    {
                        "configuration": key,
                        "batch": place,
                        "kl": own if reason is None else None,
                        **({} if reason is None else {"reason": reason}),
                    }
                )
            self._journal.append(*records)

    def _reason(self, key: str, specs: Mapping[int, LayerSpec], place: int, kls: Sequence[float]) -> str:
        """Why a batch has no KL."""
        kl = next(kl for kl in kls if not math.isfinite(kl))
        layer = self._simulator.broken_layer(specs, places=[place])
        where = "" if layer is None else f" from layer {layer} on"
        pairs = ", ".join(pair for pair, *_ in _parts_of(key))
        return f"a measured KL must be finite, but is {kl}{where} ({pairs}); run the model in a wider dtype"

    def _spec(self, layer: int, pair: PrecisionPair, k_transform: str, v_transform: str) -> LayerSpec:
        """The one object for all layers that are stored alike: by it a simulator knows what it need not run again."""
        key = layer, f"{pair} {k_transform} {v_transform}"
        if key not in self._specs:
            self._specs[key] = _layer_spec(layer, (pair, k_transform, v_transform), self._table, self._options)
        return self._specs[key]
