"""The scale layout of keys and of values: the better of two that take equal bytes, by the KL of the whole model.

Knows nothing of budgets, nor of which sides are to be measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median_high
from typing import TYPE_CHECKING, Any, Final

from kvtuner.calibration.auto_settings.whole_model_kl import (
    Comparand,
    WholeModelKL,
    finite_or_none,
    mean_over_sequences,
    refuse_other_run,
)
from kvtuner.precision import SHORT_WORD_BITS, WIDE_WORD_BITS, WIDEST_PACKED_BITS, ScaleLayout, Side

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.calibration.workbench import Workbench
    from kvtuner.run_folder import RunFolder

JOURNAL: Final = "scale-layouts.jsonl"
_FACTS: Final = ("side", "group_size", "word_bits", "bits")
WORTHWHILE_RATIO: Final = 0.9
"""The share of the KL of wide words below which short ones are worth a third more instructions in decode."""


def equal_layouts(head_dim: int) -> tuple[ScaleLayout, ScaleLayout] | None:
    """Wide words of whole heads and short words of half heads, whose rows below 8 bits take equal bytes.

    Rows of 8 bits, whose words are always wide, are longer by a word a head in half heads. Heads that can be packed at
    some widths in whole heads can be so in halves. None where head_dim is no power of two: the Triton kernels have no
    launch settings for halves of other heads.
    """
    if head_dim & (head_dim - 1):
        return None
    return ScaleLayout(head_dim, WIDE_WORD_BITS), ScaleLayout(head_dim // 2, SHORT_WORD_BITS)


@dataclass(frozen=True, slots=True)
class LayoutComparison:
    """The two layouts of one side, with the KL of the model at one width, nats per token.

    A KL is the geometric mean over sequences, of which few have most of the arithmetic mean; infinite where one is.
    """

    side: Side
    wide: ScaleLayout
    short: ScaleLayout
    bits: int
    wide_kl: float
    short_kl: float

    @property
    def ratio(self) -> float:
        """The KL of short words over that of wide ones; NaN if both are infinite."""
        return self.short_kl / self.wide_kl

    @property
    def chosen(self) -> ScaleLayout:
        """The short words where their KL is lower by a tenth, else the wide ones, which cost less to read."""
        return self.short if self.ratio < WORTHWHILE_RATIO else self.wide

    @property
    def figures(self) -> dict[str, Any]:
        """The width, the KL of both and their ratio, as JSON values; None where one is not finite."""
        kls = {"wide_kl": self.wide_kl, "short_kl": self.short_kl, "ratio": self.ratio}
        return {"bits": self.bits, **{name: finite_or_none(kl) for name, kl in kls.items()}}

    def apply(self, options: QuantizationOptions) -> QuantizationOptions:
        """The options with this side's choice; as they are where it is the wide words, their default."""
        return options if self.chosen == self.wide else with_layout(options, self.side, self.chosen)


def with_layout(options: QuantizationOptions, side: Side, layout: ScaleLayout) -> QuantizationOptions:
    """The options with the layout of one side."""
    return replace(options, k_layout=layout) if side == "k" else replace(options, v_layout=layout)


def compared_width(widths: Iterable[int]) -> int:
    """The width at which layouts are compared: the middle one of those below 8, whose words differ.

    It chose as the mean over all widths in 44 of 47 comparisons of small models, all others of 4 or 8 short sequences;
    every other width would take as many forward passes again.
    """
    return median_high(bits for bits in widths if bits < WIDEST_PACKED_BITS)


def undecided_facts(sides: Iterable[Side]) -> tuple[str, ...]:
    """The facts of a run's identity that the choice of these sides decides."""
    return tuple(f"{side}_{name}" for side in sides for name in ("group_size", "word_bits"))


def compare_layouts(
    bench: Workbench, layouts: Mapping[Side, tuple[ScaleLayout, ScaleLayout]], folder: RunFolder
) -> tuple[LayoutComparison, ...]:
    """Measure the layouts of each side on the calibrate split, or read what an earlier run measured in `folder`.

    The other side is exact. Fit, grids, window and read plan are those of the workbench.

    Raises:
        RunFolderError: The folder holds the measurements of another model, data or settings.
        NonFiniteActivationError: The model gives NaN or infinity as it is.
    """
    refuse_other_run(folder, bench.identity(), undecided_facts(layouts))
    quant = bench.options.quant
    bits = compared_width(quant.widths)

    def settings(comparand: Comparand) -> tuple[QuantizationOptions, int, Sequence[Side]]:
        side, group_size, word_bits, _ = comparand
        return with_layout(quant, side, ScaleLayout(group_size, word_bits)), bits, (side,)

    def comparand(side: Side, layout: ScaleLayout) -> Comparand:
        return side, layout.group_size, layout.word_bits, bits

    model = WholeModelKL(bench, folder, JOURNAL, _FACTS, settings)
    kls = model.of_each_sequence([comparand(side, layout) for side, pair in layouts.items() for layout in pair])
    return tuple(
        LayoutComparison(side, *pair, bits, *(mean_over_sequences(kls[comparand(side, layout)]) for layout in pair))
        for side, pair in layouts.items()
    )
