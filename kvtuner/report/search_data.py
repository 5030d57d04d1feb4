"""The data that a search's report shows, as plain values, and its JSON form. Knows nothing of measuring or drawing."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from kvtuner.errors import RunFolderError
from kvtuner.evaluation.statistics import DEFAULT_LEVEL, Interval
from kvtuner.exported_configs.verdict import TRANSFORMED, Verdict
from kvtuner.precision import ExactWindow, tokens_per_gib
from kvtuner.report.layer_strip import LayerRow  # noqa: TC001 - pydantic looks it up to read the JSON
from kvtuner.tuner.refinement_gain import RefinementGain  # noqa: TC001 - likewise

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

REPORT_VERSION: Final = 1
DATA_FILE: Final = "report-data.json"
ALL_OFFSETS: Final = "all"
"""The kind of offsets of results over small and large ones."""
_PAIR: Final = re.compile("K[0-9]+V[0-9]+")
SAMPLED: Final = "sampler"
"""The source of the sampler's own trials; that of a warm start is any other text."""
SCORE_TITLES: Final = {
    "kl": "isolated KL, nats per token",
    "fisher": "Fisher score, nats per token",
    "e_o": "relative error of the attention output (e_o)",
}


def rank_text(tp_size: int, pp_size: int) -> str:
    """The rank whose bytes are shown, to be put behind a figure; empty where one rank holds the whole model."""
    return "" if tp_size == pp_size == 1 else f" on a rank of TP {tp_size} x PP {pp_size}"


@dataclass(frozen=True, slots=True)
class BudgetOutcome:
    """The budget as the user wrote it, and what the winner takes: bytes are those of the fullest rank.

    Attributes:
        window_bytes: The bytes of one request's exact copies; None in data of an earlier release.
        context_length: The tokens that are served in one request at most; None in data of an earlier release.
        index_bytes: The bytes of one token's keys of indexes, of every scheme, which only counts of tokens and requests
            hold.
    """

    asked: str
    mean_bits: float
    effective_bits: float
    bytes_per_token: int
    bf16_bytes_per_token: int
    tp_size: int = 1
    pp_size: int = 1
    residual_length: int = 0
    sinks: int = 0
    window_bytes: int | None = None
    context_length: int | None = None
    index_bytes: int = 0

    @property
    def window(self) -> ExactWindow:
        """The tokens that are kept exactly beside their rows, which no figure above counts."""
        return ExactWindow(self.residual_length, self.sinks)

    @property
    def ratio(self) -> float:
        """The factor by which more tokens fit than with bf16."""
        return (self.bf16_bytes_per_token + self.index_bytes) / (self.bytes_per_token + self.index_bytes)

    @property
    def tokens(self) -> int:
        """The tokens that fit into one GiB."""
        return tokens_per_gib(self.bytes_per_token + self.index_bytes)

    @property
    def bf16_tokens(self) -> int:
        """The same in bf16."""
        return tokens_per_gib(self.bf16_bytes_per_token + self.index_bytes)


@dataclass(frozen=True, slots=True)
class ScoreSet:
    """The scores of one candidate by the names of `SCORE_TITLES`; None where not measured."""

    kl: float | None
    fisher: float | None
    e_o: float | None

    def get(self, name: str) -> float | None:
        """The score of that name."""
        score: float | None = getattr(self, name)
        return score


@dataclass(frozen=True, slots=True)
class SensitivityRow:
    """Scores of one layer, side and width: under its best transform, and under none."""

    layer: int
    side: Literal["k", "v"]
    bits: int
    transform: str
    best: ScoreSet
    plain: ScoreSet


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One point of the exact front over the additive scores."""

    effective_bits: float
    mean_bits: float
    predicted_kl: float


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """One assembled configuration, measured on the select split."""

    effective_bits: float
    mean_bits: float
    kl: float | None
    kind: str


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One configuration on the report split; figures are None where not measured.

    Attributes:
        bytes_per_token: The stored bytes, on a rank as in `BudgetOutcome`.
        kl_p99: The 99th percentile of KL over tokens, nats.
        top1: The share of tokens whose most likely next token is the reference's, in [0, 1].
        difference: The paired difference, this row's KL minus the winner's; None in the winner's own row.
    """

    name: str
    transforms: bool
    mean_bits: float
    effective_bits: float
    bytes_per_token: int
    kl: Interval | None
    kl_p99: float | None
    top1: float | None
    perplexity: float | None
    fits_budget: bool
    difference: Interval | None = None

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the pair that is the name."""
        return _PAIR.fullmatch(self.name) is not None

    @property
    def label(self) -> str:
        """The name, and of a uniform whether it has transforms."""
        return f"{self.name}{TRANSFORMED}" if self.transforms and self.is_uniform else self.name


@dataclass(frozen=True, slots=True)
class OffsetQuality:
    """The winner beside uniforms and fp8, all at ``small`` or ``large`` position offsets, such as ``0 to 511``.

    Attributes:
        num_sequences: The sequences of the report split; None in data of an earlier release.
    """

    offsets: str
    positions: str
    reference_perplexity: float | None
    winner: QualityRow
    baselines: tuple[QualityRow, ...]
    num_sequences: int | None = None

    @property
    def measured_at(self) -> str:
        """What was measured in one line: the number of sequences and their positions."""
        sequences = "" if self.num_sequences is None else f"{self.num_sequences} sequences at "
        return f"{sequences}{self.offsets_text} positions ({self.positions})"

    @property
    def offsets_text(self) -> str:
        """The kind of offsets as an adjective of positions."""
        return "all measured" if self.offsets == ALL_OFFSETS else self.offsets

    def rows(self) -> list[QualityRow]:
        """The winner, then the baselines from most to least memory, those without transforms first."""
        ranked = sorted(self.baselines, key=lambda row: (-row.effective_bits, row.name, row.transforms))
        return [self.winner, *ranked]

    def deciding_rows(self) -> list[QualityRow]:
        """The winner, the best uniform inside the budget with and without transforms, and fp8."""
        rivals = [self.best_baseline(transforms=flag) for flag in (True, False)]
        rivals += [row for row in self.baselines if not row.is_uniform]
        return [self.winner, *(row for row in rivals if row is not None)]

    def best_baseline(self, *, transforms: bool) -> QualityRow | None:
        """The baseline of least KL inside the budget, among those with or without transforms."""
        allowed = [row for row in self.baselines if row.fits_budget and row.transforms == transforms and row.kl]
        return min(allowed, key=lambda row: row.kl.mean if row.kl else math.inf, default=None)

    def records(self) -> Iterator[dict[str, Any]]:
        """The rows for a notebook's table, with their intervals in columns."""
        for row in (self.winner, *self.baselines):
            low, mean, high = (row.kl.low, row.kl.mean, row.kl.high) if row.kl else (None, None, None)
            yield {
                "offsets": self.offsets,
                "name": row.label,
                "mean_bits": row.mean_bits,
                "effective_bits": row.effective_bits,
                "bytes_per_token": row.bytes_per_token,
                "kl": mean,
                "kl_low": low,
                "kl_high": high,
                "top1": row.top1,
                "perplexity": row.perplexity,
                "fits_budget": row.fits_budget,
            }


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """One trial of the study, with its KL on the select split; None where nothing was measured."""

    number: int
    value: float | None
    feasible: bool
    source: str


@dataclass(frozen=True, slots=True)
class RankCorrelation:
    """Spearman's rho of a cheap score with the isolated KL of the same candidates."""

    score: str
    side: Literal["k", "v"]
    rho: float | None


@dataclass(frozen=True, slots=True)
class AdditivityRow:
    """A configuration whose predicted KL (sum of isolated scores) was checked by measuring it."""

    name: str
    predicted: float
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """The measured KL over the predicted; None where there is no such number."""
        return None if self.measured is None or self.predicted <= 0 else self.measured / self.predicted


@dataclass(frozen=True, slots=True)
class PairAdditivity:
    """The distance of e_o of K/V pairs from the sum of the sides' e_o, relative to that sum, without transforms."""

    num_pairs: int
    median: float
    maximum: float


@dataclass(frozen=True, slots=True)
class UniformKl:
    """KL of one uniform pair on the select split."""

    k_bits: int
    v_bits: int
    kl: float | None


@dataclass(frozen=True, slots=True)
class ReportData:
    """The data that the report, its pictures and the terminal table show; a field is empty where nothing was measured.

    Attributes:
        score: The score that bits were allocated by.
        quality: The quality on the report split; the first entry is drawn in the front's picture.
        sensitivity: The scores of every layer, side and width, in any order.
        front: The exact front, by ascending bits.
        refinement: What refinement gained over the exact solution; None where nothing was searched or that has no
            finite KL.
        uniform_winner: The label of the uniform that took the searched configuration's place; None if that won.
        uniform_kl: The cells of the K x V table, with the best transforms where `uniform_kl_transforms`.
        scale_words: The bits and groups of the scale words in one line; empty where the search left them as they are.
        window_length: The chosen length of the exact window in one line; empty where the search was told it.
        verdict: What the profile gained, and what to do; None in data of an earlier release.
        forwards: The forward passes by phase.
        provenance: The rows of names and values that say nothing of a machine.
    """

    model: str
    corpus: str
    read_plan: str
    score: Literal["kl", "fisher", "e_o"]
    budget: BudgetOutcome
    layers: tuple[LayerRow, ...]
    quality: tuple[OffsetQuality, ...] = ()
    sensitivity: tuple[SensitivityRow, ...] = ()
    front: tuple[FrontPoint, ...] = ()
    measured: tuple[MeasuredPoint, ...] = ()
    trials: tuple[TrialPoint, ...] = ()
    refinement: RefinementGain | None = None
    uniform_winner: str | None = None
    rank_correlations: tuple[RankCorrelation, ...] = ()
    additivity: tuple[AdditivityRow, ...] = ()
    pair_additivity: PairAdditivity | None = None
    uniform_kl: tuple[UniformKl, ...] = ()
    uniform_kl_transforms: bool = True
    scale_words: str = ""
    window_length: str = ""
    verdict: Verdict | None = None
    forwards: tuple[tuple[str, int], ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()
    interval_level: float = DEFAULT_LEVEL

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; a number that is not finite becomes null."""
        from pydantic_core import to_jsonable_python

        return {"version": REPORT_VERSION, **to_jsonable_python(self, inf_nan_mode="null")}

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> ReportData:
        """Read the report data that `to_json` made.

        Raises:
            RunFolderError: The data has another version, or a field that is absent or of the wrong type.
        """
        from pydantic import TypeAdapter, ValidationError

        # The version first: fields of another version would be called damaged.
        fields = dict(payload)
        version = fields.pop("version", None)
        if version != REPORT_VERSION:
            raise RunFolderError(
                f"report data has version {version!r}, this kvtuner reads {REPORT_VERSION}; run the search again"
            )
        try:
            return TypeAdapter(cls).validate_json(json.dumps(fields), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "its top level"
            raise RunFolderError(f"report data is damaged at {where} ({first['msg']}); run the search again") from error
