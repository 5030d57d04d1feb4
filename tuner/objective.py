"""The measured KL of configurations on the select split, journalled. Knows nothing of budgets or samplers."""

from __future__ import annotations

import math
from bisect import bisect_right
from statistics import fmean
from typing import TYPE_CHECKING, Final

from kvtuner.calibration.forward.simulator import LayerSpec
from kvtuner.errors import NonFiniteActivationError
from kvtuner.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtuner.calibration.forward.simulator import Simulator
    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.calibration.sensitivity import SensitivityTable
    from kvtuner.run_folder import RunFolder
    from kvtuner.search_spaces.space import LayerChoice

JOURNAL: Final = "measured.jsonl"
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
    return {layer: _layer_spec(layer, choice, table, options) for layer, choice in enumerate(configuration)}


def _layer_spec(layer: int, choice: LayerChoice, table: SensitivityTable, options: QuantizationOptions) -> LayerSpec:
    return LayerSpec(
        options.spec("k", choice.pair.k_bits, table.constants_of(layer, "k", choice.k_transform)),
        options.spec("v", choice.pair.v_bits, table.constants_of(layer, "v", choice.v_transform)),
        options.window,
    )


class MeasuredKL:
    """The mean KL per scored token of a configuration, nats; what a run folder holds of it is not run again."""

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
        sizes = [len(item.batch.input_ids) for item in simulator.prepared]
        # The margin by the number of batches after which it is applied; with few batches the later one takes its place.
        margins = {-(-len(sizes) // part): margin for part, margin in RACE}
        margins.pop(len(sizes), None)  # after the last batch nothing is left to save
        self._margins = list(enumerate(margins.values(), start=1))
        # Batches, and sequences, that have run after each stage of the race; none after stage 0.
        self._batches = [0, *margins, len(sizes)]
        self._ends = [sum(sizes[:batches]) for batches in self._batches]
        self.num_sequences = 0
        """The number of sequences that all returned values together are means of."""
        self._journal = Journal(folder, JOURNAL, identity)
        self._measured: dict[str, list[float]] = {}
        """The KLs of each configuration's first sequences."""
        self._read_journal()

    def __call__(self, configuration: Sequence[LayerChoice]) -> float:
        """Measure, or look up, one configuration on all sequences.

        Raises:
            NonFiniteActivationError: The KL is NaN or infinite; nothing is journalled.
        """
        return fmean(self.of_each_sequence(configuration))

    def of_each_sequence(self, configuration: Sequence[LayerChoice]) -> list[float]:
        """The same without the mean: the KL of every sequence in turn."""
        kls = self._sequence_kls(configuration)
        self.num_sequences += len(kls)
        return kls

    def against(self, configuration: Sequence[LayerChoice], best: Sequence[LayerChoice]) -> float:
        """Measure one configuration, but only estimate one that soon turns out to be clearly worse than `best`.

        After each part of `RACE` the ratio of its KL to that of `best` on the same sequences is compared with the
        margin. Beyond the margin it is not measured further: its value is that ratio times the KL of `best`. What other
        calls have measured of it makes no difference.

        Raises:
            NonFiniteActivationError: The KL is NaN or infinite; nothing is journalled.
        """
        best_kls = self._sequence_kls(best)
        for stages, margin in self._margins:
            kls = self._sequence_kls(configuration, stages)
            best_so_far = sum(best_kls[: len(kls)])
            if sum(kls) > margin * best_so_far > 0:
                self.num_sequences += len(kls)
                return fmean(best_kls) * sum(kls) / best_so_far
        return self(configuration)

    def _sequence_kls(self, configuration: Sequence[LayerChoice], stages: int | None = None) -> list[float]:
        """The mean KL of every sequence of the first stages, None for all; what is missing runs in one go."""
        last = len(self._ends) - 1 if stages is None else stages
        key = configuration_key(configuration)
        if len(self._measured.get(key, ())) < self._ends[last]:
            self._read_journal()  # another worker may have measured it meanwhile
        kls = self._measured.get(key, [])
        if len(kls) < self._ends[last]:
            # An interrupted or another worker's measurement may end within a stage: that stage runs whole.
            done = bisect_right(self._ends, len(kls)) - 1
            kls = kls[: self._ends[done]]
            more = self._run(configuration, slice(self._batches[done], self._batches[last]))
            self._journal.append({"configuration": key, "first": len(kls), "kl": more})
            kls = self._measured[key] = kls + more
        return kls[: self._ends[last]]

    def _run(self, configuration: Sequence[LayerChoice], batches: slice) -> list[float]:
        specs = {layer: self._spec(layer, choice) for layer, choice in enumerate(configuration)}
        kls: list[float] = self._simulator.measure(specs, batches=batches).kl.mean(dim=1).tolist()
        for kl in kls:
            if not math.isfinite(kl):
                pairs = ", ".join(str(choice.pair) for choice in configuration)
                layer = self._simulator.broken_layer(specs, batches=batches)
                where = "" if layer is None else f" from layer {layer} on"
                raise NonFiniteActivationError(
                    f"a measured KL must be finite, but is {kl}{where} ({pairs}); run the model in a wider dtype"
                )
        return kls

    def _spec(self, layer: int, choice: LayerChoice) -> LayerSpec:
        """The one object for all layers that are stored alike: by it a simulator knows what it need not run again."""
        key = layer, configuration_key([choice])
        if key not in self._specs:
            self._specs[key] = _layer_spec(layer, choice, self._table, self._options)
        return self._specs[key]

    def _read_journal(self) -> None:
        for record in self._journal.unread():
            kls = self._measured.setdefault(record["configuration"], [])
            last = record["first"] + len(record["kl"])
            if record["first"] <= len(kls) < last:  # a line before it may be damaged, or of another worker
                kls[record["first"] :] = record["kl"]
