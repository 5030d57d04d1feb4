"""The length of the exact window: the one with the least KL where rows give up what its copies take.

Knows nothing of budgets, nor of when a length is to be chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvtuner.calibration.auto_settings.whole_model_kl import (
    Comparand,
    WholeModelKL,
    finite_or_none,
    mean_over_sequences,
    refuse_other_run,
)
from kvtuner.precision import SIDES, ExactWindow

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.calibration.workbench import Workbench
    from kvtuner.precision import Side
    from kvtuner.run_folder import RunFolder

JOURNAL: Final = "window-lengths.jsonl"
_FACTS: Final = ("residual_length", "bits")
COMPARED_LENGTHS: Final = (0, 16, 32, 64, 128, 256)
LARGEST_SHARE: Final = 8
"""Windows longer than this part of a sequence are not compared: hardly any token would be read from rows."""
COMPARED_BITS: Final = 3
"""The payload bits that rows and copies have together in the comparison."""
WINDOW_FACTS: Final = ("residual_length", "sinks")


def lengths_for(sequence_length: int) -> tuple[int, ...]:
    """The lengths that sequences of so many tokens can compare; 0 is always among them."""
    return tuple(length for length in COMPARED_LENGTHS if length <= sequence_length // LARGEST_SHARE)


@dataclass(frozen=True, slots=True)
class LengthComparison:
    """Window lengths with the KL of the model under each, at two widths of keys and values.

    Attributes:
        context_length: tokens of the request in which a window's copies are counted.
        sinks: The first tokens, which every window keeps.
        kl: The KL of each length at the narrow and at the wide width, nats per token, geometric means over sequences.
        widths: The two widths, of which `COMPARED_BITS` is the wide one or lies between.
    """

    context_length: int
    sinks: int
    kl: Mapping[int, tuple[float, float]]
    widths: tuple[int, int]

    def kl_at_equal_bytes(self, length: int) -> float:
        """The KL of rows of `COMPARED_BITS` payload bits, less those of the copies; infinite if too few are left.

        Between the two widths the logarithm of the KL is taken as linear in the bits.
        """
        narrow, wide = self.widths
        copies = float(ExactWindow(length, self.sinks).bits_at(self.context_length))
        share = (COMPARED_BITS - copies - narrow) / (wide - narrow)
        if share < 0 or math.inf in self.kl[length]:
            return math.inf
        low, high = map(math.log, self.kl[length])
        return math.exp(low + share * (high - low))

    @property
    def chosen(self) -> int:
        """The length with the least KL at equal bytes, the shortest of equals."""
        return min(self.kl, key=lambda length: (self.kl_at_equal_bytes(length), length))

    def __str__(self) -> str:
        kls = {length: self.kl_at_equal_bytes(length) for length in self.kl}
        share = "" if math.inf in (kls[self.chosen], kls[0]) else f", {kls[self.chosen] / kls[0]:.2f} of the KL without"
        lengths = ", ".join(map(str, self.kl))
        return f"the last {self.chosen} tokens, of {lengths}{share} at equal bytes in {self.context_length:,} tokens"

    @property
    def figures(self) -> dict[str, Any]:
        """The KL of every length as it is and at equal bytes, as JSON values; None where one is not finite."""
        return {
            "widths": list(self.widths),
            "kl": {length: [finite_or_none(kl) for kl in kls] for length, kls in self.kl.items()},
            "at_equal_bytes": {length: finite_or_none(self.kl_at_equal_bytes(length)) for length in self.kl},
        }

    def apply(self, options: QuantizationOptions) -> QuantizationOptions:
        """The options with the chosen window."""
        return replace(options, window=ExactWindow(self.chosen, self.sinks))


def compare_lengths(bench: Workbench, folder: RunFolder, undecided: Collection[str] = ()) -> LengthComparison:
    """Measure the lengths on the calibrate split, or read what an earlier run measured in `folder`.

    Grids, layouts and read plan are those of the workbench, and its sinks; its own length is not read. `undecided` are
    further facts of the run's identity that are chosen later.

    Raises:
        RunFolderError: The folder holds the measurements of another model, data or settings.
        NonFiniteActivationError: The model gives NaN or infinity as it is.
    """
    quant = bench.options.quant
    sinks = quant.window.sinks
    bench = bench.with_quant(replace(quant, window=ExactWindow(0, sinks)))
    refuse_other_run(folder, bench.identity(), {*WINDOW_FACTS, *undecided})
    narrow = min(quant.widths)
    widths = narrow, min(bits for bits in quant.widths if bits >= COMPARED_BITS)

    def settings(comparand: Comparand) -> tuple[QuantizationOptions, int, Sequence[Side]]:
        length, bits = comparand
        return replace(quant, window=ExactWindow(length, sinks)), bits, SIDES

    lengths = lengths_for(bench.corpus.splits["calibrate"].shape[1])
    model = WholeModelKL(bench, folder, JOURNAL, _FACTS, settings)
    kls = model.of_each_sequence([(length, bits) for length in lengths for bits in widths])
    kl = {}
    for length in lengths:
        narrow_kl, wide_kl = (mean_over_sequences(kls[length, bits]) for bits in widths)
        kl[length] = narrow_kl, wide_kl
    return LengthComparison(bench.loaded.shape.context_length, sinks, kl, widths)
