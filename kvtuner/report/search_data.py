"""All that a report shows, as plain values, and its JSON form. Knows nothing of measuring or drawing."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from kvtuner.errors import RunFolderError
from kvtuner.evaluation.statistics import DEFAULT_LEVEL, Interval
from kvtuner.precision import tokens_per_gib
from kvtuner.report.formatting import plain_json

if TYPE_CHECKING:
    from collections.abc import Mapping

REPORT_VERSION: Final = 1
SAMPLED: Final = "sampler"


def rank_words(tp_size: int, pp_size: int) -> str:
    """Whose bytes are shown, to be put behind a figure; empty where one rank holds the whole model."""
    return "" if tp_size == pp_size == 1 else f" on a rank of TP {tp_size} x PP {pp_size}"


DATA_FILE: Final = "report-data.json"


@dataclass(frozen=True, slots=True)
class BudgetOutcome:
    """What was asked for and what the winner takes.

    Attributes:
        asked: the budget as the user wrote it.
        mean_bits: payload bits per element of the whole model.
        effective_bits: stored bits per element of the whole model.
        bytes_per_token: stored bytes on the fullest rank.
        bf16_bytes_per_token: of the unquantized cache on its fullest rank.
    """

    asked: str
    mean_bits: float
    effective_bits: float
    bytes_per_token: int
    bf16_bytes_per_token: int
    tp_size: int = 1
    pp_size: int = 1

    @property
    def tokens_per_gib(self) -> int:
        """Tokens that fit into 1 GiB."""
        return tokens_per_gib(self.bytes_per_token)

    @property
    def bf16_tokens_per_gib(self) -> int:
        """Tokens of the unquantized cache that fit into 1 GiB."""
        return tokens_per_gib(self.bf16_bytes_per_token)

    @property
    def rank(self) -> str:
        """Whose bytes these are; empty where one rank holds the whole model."""
        return rank_words(self.tp_size, self.pp_size)

    @property
    def ratio(self) -> float:
        """How many times more tokens fit than with bf16."""
        return self.bf16_bytes_per_token / self.bytes_per_token


@dataclass(frozen=True, slots=True)
class LayerRow:
    """What the winner stores in one layer."""

    layer: int
    k_bits: int
    v_bits: int
    k_transform: str
    v_transform: str


@dataclass(frozen=True, slots=True)
class ScoreSet:
    """Scores of one candidate; None where not measured."""

    kl: float | None
    fisher: float | None
    e_o: float | None

    def get(self, name: str) -> float | None:
        """The score of that name."""
        return {"kl": self.kl, "fisher": self.fisher, "e_o": self.e_o}[name]


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
    """One configuration on the report split.

    Attributes:
        name: ``K4V4``, ``fp8``, or the winner's name.
        transforms: whether keys and values are transformed before rounding.
        mean_bits: payload bits per element.
        effective_bits: stored bits per element.
        bytes_per_token: stored bytes, per rank as in `BudgetOutcome`.
        kl: nats per token; None where not measured.
        kl_p99: 99th percentile over tokens, nats.
        top1: share of tokens whose most likely next token is the reference's, in [0, 1].
        perplexity: on the report split.
        fits_budget: whether it would have been allowed.
        difference: paired, this row's KL minus the winner's; None in the winner's own row.
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
    def label(self) -> str:
        """Name, and whether there are transforms."""
        return f"{self.name} + transforms" if self.transforms else self.name


@dataclass(frozen=True, slots=True)
class OffsetQuality:
    """The winner beside its baselines, all at one kind of position offsets.

    Attributes:
        offsets: ``small`` or ``large``.
        positions: the range in words, such as ``0 to 511``.
        reference_perplexity: of the unquantized model on the same tokens.
        winner: the searched configuration.
        baselines: uniform ones and fp8.
    """

    offsets: str
    positions: str
    reference_perplexity: float | None
    winner: QualityRow
    baselines: tuple[QualityRow, ...]

    def ranked_baselines(self) -> list[QualityRow]:
        """The baselines from most to least memory, those without transforms first."""
        return sorted(self.baselines, key=lambda row: (-row.effective_bits, row.name, row.transforms))

    def best_baseline(self, *, transforms: bool) -> QualityRow | None:
        """The baseline of least KL inside the budget, among those with or without transforms."""
        allowed = [row for row in self.baselines if row.fits_budget and row.transforms == transforms and row.kl]
        return min(allowed, key=lambda row: row.kl.mean if row.kl else math.inf, default=None)


@dataclass(frozen=True, slots=True)
class TrialPoint:
    """One trial of the study.

    Attributes:
        number: in the order of the study.
        value: measured KL on the select split; None where nothing was measured.
        feasible: inside the budget.
        source: `SAMPLED` for the sampler's own, any other word for a warm start.
    """

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


@dataclass(frozen=True, slots=True)
class PairAdditivity:
    """How far e_o of K/V pairs is from the sum of its sides' e_o, relative to that sum, without transforms."""

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
    """All that the report, its pictures and the terminal table draw from.

    Attributes:
        model: id of the model.
        corpus: name of the data.
        read_plan: ``decode``, ``hit`` or ``cache``.
        score: what bits were allocated by: ``kl``, ``fisher`` or ``e_o``.
        budget: asked and reached.
        layers: the winner, in the order of layers.
        quality: on the report split; the first entry is drawn in the front's picture. Empty if not validated.
        sensitivity: in any order.
        front: by ascending bits.
        measured: configurations of the select split.
        trials: the study, in order.
        gain: by how much the study's best is below the exact solution on the select split, nats per token; None where
            nothing was searched or the exact solution was not measured.
        uniform_winner: label of the uniform that took the searched configuration's place; None if that won.
        rank_correlations: of the cheap scores.
        additivity: checks of the prediction.
        pair_additivity: of the paper's e_o; None where pairs were not asked for.
        uniform_kl: the K x V table.
        uniform_kl_transforms: whether that table is with the best transforms.
        forwards: (phase, forward passes).
        provenance: (name, value) rows that say nothing of a machine.
        interval_level: confidence of every interval.
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
    gain: float | None = None
    uniform_winner: str | None = None
    rank_correlations: tuple[RankCorrelation, ...] = ()
    additivity: tuple[AdditivityRow, ...] = ()
    pair_additivity: PairAdditivity | None = None
    uniform_kl: tuple[UniformKl, ...] = ()
    uniform_kl_transforms: bool = True
    forwards: tuple[tuple[str, int], ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()
    interval_level: float = DEFAULT_LEVEL

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; a number that is not finite becomes null."""
        return {"version": REPORT_VERSION, **plain_json(asdict(self))}

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> ReportData:
        """Read what `to_json` made.

        Raises:
            RunFolderError: another version, or a field that is absent or of the wrong type.
        """
        from pydantic import TypeAdapter, ValidationError

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
