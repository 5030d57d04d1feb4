"""The verdict on a measured profile: what it gained beside its rivals, and what to do. Knows nothing of outputs.

Terminal, report, card, page, JSON and Python all say it in these words. The rules are in docs/method.md.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Any, Final, Literal

from kvtuner.exported_configs.padded_rows import layers_with_room, wider_in_no_more_bytes
from kvtuner.exported_configs.scheme_names import FP8
from kvtuner.layer_ranges import write_layers, write_ranges
from kvtuner.precision import ROW_ALIGNMENT_BYTES, SIDES, PrecisionPair

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtuner.exported_configs.profile.layer_storage import LayerRecord
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import (
        BaselineRecord,
        BudgetPoint,
        IntervalRecord,
        QualityRecord,
        SplitCounts,
        UniformRecord,
    )
    from kvtuner.precision import Side

Recommendation = Literal["use", "use the uniform", "another budget", "more text"]
HARMLESS_KL: Final = 0.02
"""The KL, nats per token, up to which a cache is taken for harmless whatever fp8 has."""
FP8_FACTOR: Final = 2.0
"""The multiple of fp8's KL up to which a cache is taken for harmless."""
MOST_HARMLESS_KL: Final = FP8_FACTOR * HARMLESS_KL
"""The KL, nats per token, above which no cache is taken for harmless: fp8 is a measure only where it does no harm."""
EQUAL_SHARE: Final = 0.25
"""The share of the uniform's KL within which a difference must surely lie for both to be called equal."""
EQUAL_KL: Final = 0.001
"""The difference in KL, nats per token, within which both are equal whatever share of the uniform's KL it is."""
LEAST_UNITS: Final = 6
"""The fewest units that can differ clearly: all with one sign have p = 2 ** (1 - units) when signs are flipped."""
TRANSFORMED: Final = " + transforms"
MAX_SEQUENCES: Final = 4096
"""The most report sequences that are suggested."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a profile gained, and what to do.

    Attributes:
        findings: Sentences on size, quality, and what bits by layer gained.
        recommendation: The advice in a word or two.
        advice: The advice in a sentence, with the flags of the search that it asks for, if it asks for one.
    """

    findings: tuple[str, ...]
    recommendation: Recommendation
    advice: str

    def __str__(self) -> str:
        return " ".join((*self.findings, self.advice))

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain JSON values."""
        return {"text": str(self), **asdict(self), "findings": list(self.findings)}


def harmless_kl(fp8_kl: float | None) -> float:
    """The KL, nats per token, up to which a cache is taken for harmless, beside fp8's where that was measured."""
    return HARMLESS_KL if fp8_kl is None else min(max(HARMLESS_KL, FP8_FACTOR * fp8_kl), MOST_HARMLESS_KL)


def verdict_of(profile: Profile) -> Verdict | None:
    """The verdict on a profile; None where nothing was measured."""
    return None if profile.quality is None else _Facts(profile, profile.quality).verdict()


class _Facts:
    """A profile's figures beside those of its rivals."""

    def __init__(self, profile: Profile, quality: QualityRecord) -> None:
        self.profile, self.quality, self.kl = profile, quality, quality.measured_kl.mean
        self.baselines = {baseline.name: baseline for baseline in quality.baselines}
        self.fp8 = self.baselines.get(FP8)
        self.uniform: UniformRecord | None = quality.best_uniform
        self.limit = harmless_kl(self.fp8.kl_mean if self.fp8 else None)

    def verdict(self) -> Verdict:
        others = (*self._gains(), *self._next_budget(), *self._same_bytes())
        findings = (self._size(), self._quality(), *self._beside_uniform(), *others)
        if self._is_harmful:
            return Verdict(findings, "another budget", self._larger_budget())
        if self._lower_in_no_more_bytes is not None and self._is_surely_lower(self._lower_in_no_more_bytes):
            return Verdict(findings, "another budget", f"Search by bytes: --budget {self._bytes_asked}.")
        if self._counts is not None and self._is_little_text:
            return Verdict(findings, "more text", self._enough_text(self._counts))
        if self.uniform is None or self._is_rival or self._is_below:
            return Verdict(findings, "use", "Use it.")
        if self._is_equal or self._is_above:
            quality = "as good" if self._is_equal else "better"
            advice = f"Use {self._uniform_by_search(self.uniform)}: it is simpler, and {quality}."
            return Verdict(findings, "use the uniform", advice)
        return Verdict(findings, "more text", self._more_text(self.uniform))

    @property
    def _counts(self) -> SplitCounts | None:
        """The sequences of each split; None where they are not recorded."""
        calibration = self.profile.provenance.calibration
        return None if calibration is None else calibration.num_sequences

    @property
    def _is_little_text(self) -> bool:
        """Whether no difference can be clear, whatever its interval: so few sequences have one sign by chance."""
        return self._counts is not None and self._counts.report < LEAST_UNITS

    @property
    def _is_harmful(self) -> bool:
        """Whether the KL is above the limit, that of a better uniform too."""
        return (self._uniform_kl if self._is_above else self.kl) > self.limit

    @property
    def _is_rival(self) -> bool:
        """Whether the profile is the best uniform itself: of its pair, and with its transforms, so of equal results."""
        if self.uniform is None or {entry.pair for entry in self._growing} != {_pair_of(self.uniform)}:
            return False
        return self._difference.low == self._difference.high == 0

    @property
    def _growing(self) -> list[LayerRecord]:
        """The layers that take more bytes for every token."""
        growing = self.profile.geometry.growing()
        return [entry for entry in self.profile.layers if entry.layer in growing]

    @property
    def _difference(self) -> IntervalRecord:
        assert self.uniform is not None
        return self.uniform.difference

    @property
    def _is_below(self) -> bool:
        return not self._is_little_text and self._difference.high < 0

    @property
    def _is_above(self) -> bool:
        return self.uniform is not None and not self._is_little_text and self._difference.low > 0

    @property
    def _is_equal(self) -> bool:
        """Whether the difference from the uniform surely is small."""
        is_inside = -self._margin <= self._difference.low and self._difference.high <= self._margin
        return not self._is_little_text and is_inside

    @property
    def _margin(self) -> float:
        return max(EQUAL_SHARE * self._uniform_kl, EQUAL_KL)

    @property
    def _margin_text(self) -> str:
        if self._margin == EQUAL_KL:
            return f"within the {EQUAL_KL} nats that are taken for equal"
        return "within a quarter of the uniform's KL"

    @property
    def _uniform_kl(self) -> float:
        assert self.uniform is not None
        return self.baselines[self.uniform.name].kl_mean

    def _size(self) -> str:
        index, bf16 = self.profile.index_bytes, self.profile.bf16_bytes_per_token()
        stored = self.profile.bytes_per_token() + index
        return f"{(bf16 + index) / stored:.2f}x the tokens of bf16, {(bf16 / 2 + index) / stored:.2f}x of fp8."

    def _quality(self) -> str:
        text = f"KL {_figure(self.kl)} nats per token"
        if self.fp8 is not None and self.fp8.kl_mean > 0:
            text += f", {self.kl / self.fp8.kl_mean:.2g} times fp8's ({_figure(self.fp8.kl_mean)})"
        return f"{text}."

    def _beside_uniform(self) -> Sequence[str]:
        """The comparison with the fair rival, with the figures that decide it."""
        if self.uniform is None or self._is_rival:
            return ()
        rival = f"the best uniform in the budget, {_with_transforms(self.uniform.name)}"
        found = self._difference
        mean, low, high = (_figure(value, sign="+") for value in (found.mean, found.low, found.high))
        difference = f"paired difference, negative where the profile is lower, {mean} [{low}, {high}]"
        figures = f"{_figure(self._uniform_kl)}; {difference}"
        if self._is_below:
            return (f"That is {1 - self.kl / self._uniform_kl:.0%} below {rival} ({figures}).",)
        if self._is_equal:
            return (f"It is as good as {rival} ({figures}: {self._margin_text}).",)
        if self._is_above:
            times = f"{self.kl / self._uniform_kl:.2g} times" if self._uniform_kl > 0 else "above"
            return (f"That is {times} that of {rival} ({figures}).",)
        why = f"of fewer than {LEAST_UNITS} sequences" if self._is_little_text else f"not {self._margin_text}"
        return (f"The text is too little to tell whether the profile is as good as {rival} ({figures}: {why}).",)

    def _gains(self) -> Sequence[str]:
        """What bits by layer gained; where they gained nothing, what did."""
        if self.uniform is None:
            return ()
        name = _with_transforms(self.uniform.name)
        if self._is_rival:
            return (f"Bits by layer gained nothing: this is uniform {name}.{self._gain_of_transforms()}",)
        if self._is_below:
            wide = self._wide_layers()
            return (f"Stored widest are {wide}.",) if wide else ()
        if self._is_equal:
            return (f"Bits by layer gained nothing.{self._gain_of_transforms()}",)
        return ()

    def _gain_of_transforms(self) -> str:
        assert self.uniform is not None
        plain = self.baselines.get(self.uniform.name.removesuffix(TRANSFORMED))
        if not self.uniform.name.endswith(TRANSFORMED) or plain is None or plain.kl_mean <= self.kl:
            return ""
        return f" The transforms did: without them {plain.name} has {_figure(plain.kl_mean)}."

    def _wide_layers(self) -> str:
        """The layers whose keys or values have more bits than half of all layers', such as ``keys of layers 0, 4``."""
        usual = {side: median_low([_bits_of(entry, side) for entry in self._growing]) for side in SIDES}
        return self._layers_where(lambda entry, side: _bits_of(entry, side) > usual[side])

    def _layers_where(self, is_so: Callable[[LayerRecord, Side], bool]) -> str:
        """The layers whose keys or values are so, such as ``keys of layers 0, 4 and values of layer 2``."""
        parts = []
        nouns = ("keys", "values") if any(entry.v is not None for entry in self._growing) else ("latents",)
        for side, noun in zip(SIDES, nouns, strict=False):
            layers = [entry.layer for entry in self._growing if is_so(entry, side)]
            if layers:
                parts.append(f"{noun} of layer{'s' * (len(layers) > 1)} {write_layers(layers)}")
        return " and ".join(parts)

    def _same_bytes(self) -> Sequence[str]:
        """The layers that could have more bits in the same bytes, where bits were counted, and a uniform that has."""
        if self.profile.provenance.search is not None and not self.profile.budget.counts_bits:
            return ()
        room = layers_with_room(self.profile)
        layers = self._layers_where(lambda entry, side: entry.layer in room[side])
        if not layers:
            return ()
        padded = f"Rows are padded to {ROW_ALIGNMENT_BYTES} bytes, and {layers} would take no more with more bits"
        text, lower = "", self._lower_in_no_more_bytes
        if lower is not None:
            text = f" In no more bytes {_with_transforms(lower.name)} has {_figure(lower.kl_mean)}"
            text += "." if self._is_surely_lower(lower) else ", which may be chance."
        return (f"{padded}: a budget of {self._bytes_asked} counts bytes.{text}",)

    @property
    def _bytes_asked(self) -> str:
        """The budget in bytes that this profile takes; of several pipeline stages each takes its own."""
        budget = self.profile.budget
        return f"{self.profile.bytes_per_token(budget.tp_size)}B/token" if budget.pp_size == 1 else "NB/token"

    @property
    def _lower_in_no_more_bytes(self) -> BaselineRecord | None:
        """The baseline of more bits in no more bytes whose KL is lower, surely rather than by chance; None without."""
        wider = wider_in_no_more_bytes(self.profile.budget, self.quality.baselines)
        lower = [baseline for baseline in wider if baseline.kl_mean < self.kl]
        return min(lower, key=lambda one: (not self._is_surely_lower(one), one.kl_mean), default=None)

    def _is_surely_lower(self, baseline: BaselineRecord) -> bool:
        """Whether a baseline's KL surely is lower: by the paired interval if it is the uniform, else by both apart."""
        if self.uniform is not None and baseline.name == self.uniform.name:
            return self._is_above
        return not self._is_little_text and baseline.kl_high < self.quality.measured_kl.low

    def _next_budget(self) -> Sequence[str]:
        """What a bit more would bring."""
        wanted = float(self.profile.mean_bits) + 1
        for point in self.quality.larger_budgets or ():
            if point.mean_bits >= wanted and self.kl <= self.limit:
                kl, more = _figure(self._scaled(point)), self._more_bytes(point)
                return (f"By prediction {point.mean_bits:g}bit would have {kl}, in {more}.",)
        return ()

    def _scaled(self, point: BudgetPoint) -> float:
        """A predicted KL times what was measured of this profile over what was predicted of it."""
        predicted = self.quality.predicted_kl
        return point.predicted_kl * self.kl / predicted if predicted else math.inf

    def _more_bytes(self, point: BudgetPoint) -> str:
        return f"{point.effective_bits / float(self.profile.effective_bits) - 1:.0%} more bytes"

    def _larger_budget(self) -> str:
        """The smallest budget whose KL would be harmless."""
        why = "twice fp8's" if HARMLESS_KL < self.limit < MOST_HARMLESS_KL else "the most that is taken for harmless"
        why = f"this one's KL is above {_figure(self.limit)}, {why}"
        for point in self.quality.larger_budgets or ():
            if (kl := self._scaled(point)) <= self.limit:
                would = f"that would have about {_figure(kl)} in {self._more_bytes(point)}"
                return f"Use --budget {point.mean_bits:g}bit: {why}, {would}."
        return f"Use another budget: {why}."

    def _more_text(self, uniform: UniformRecord) -> str:
        """How much text would tell both apart, or show that they are equal: an interval narrows as its square root."""
        name, counts = _with_transforms(uniform.name), self._counts
        if counts is None:
            return f"Measure more text: this one does not tell it from {name}."
        half_width = (self._difference.high - self._difference.low) / 2
        wanted = max(2 * counts.report, 4 * math.ceil(counts.report * (half_width / self._margin) ** 2 / 4))
        if wanted > MAX_SEQUENCES:
            return f"Use it or {name}: to tell them apart takes more than {MAX_SEQUENCES:,} report sequences."
        return f"Measure more text: {_flags(counts, wanted)}.{self._until_then(uniform)}"

    def _enough_text(self, counts: SplitCounts) -> str:
        """The text with which a difference could be clear, at least twice as much."""
        wanted = 4 * math.ceil(max(2 * counts.report, LEAST_UNITS) / 4)
        advice = f"Measure more text: {_flags(counts, wanted)}, and fewer than {LEAST_UNITS} tell nothing apart."
        return advice if self.uniform is None or self._is_rival else advice + self._until_then(self.uniform)

    def _until_then(self, uniform: UniformRecord) -> str:
        return f" Until then use {self._uniform_by_search(uniform)}: it is simpler."

    def _uniform_by_search(self, uniform: UniformRecord) -> str:
        """The uniform, and how a search makes a profile of it."""
        ids = [entry.layer for entry in self._growing]
        layers = write_ranges([_pair_of(uniform)] * len(ids), ids=ids)
        plain = "" if uniform.name.endswith(TRANSFORMED) else " --transforms none"
        return f"uniform {_with_transforms(uniform.name)}, by a search with --layers {layers}{plain}"


def _bits_of(entry: LayerRecord, side: Side) -> int:
    return entry.pair.k_bits if side == "k" else entry.pair.v_bits


def _flags(counts: SplitCounts, wanted: int) -> str:
    """The flags that report on so many sequences, and what they do."""
    flags = f"--sequences {counts.calibrate},{counts.select},{wanted}"
    return f"{flags} reports on {wanted} sequences in place of {counts.report}"


def _pair_of(uniform: UniformRecord) -> PrecisionPair:
    return PrecisionPair.parse(uniform.name.removesuffix(TRANSFORMED))


def _with_transforms(name: str) -> str:
    return name.replace(TRANSFORMED, " with transforms")


def _figure(value: float, *, sign: Literal["", "+"] = "") -> str:
    return f"{value:{sign}#.3g}".rstrip(".")
