"""The model, budget, quality and provenance of a profile: all that the digest does not cover."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from kvtuner.exported_configs.profile.field_types import (
    CommandText,
    Count,
    Figure,
    HubId,
    Name,
    Seed,
    Sha256,
    Share,
    StrictModel,
    Text,
    TokenCount,
)
from kvtuner.read_plan_names import ReadPlanName

MAX_BASELINES: Final = 256
KL_ROUNDING: Final = 0.005
"""The share of a KL by which rounding may have moved it: half a unit of its third digit."""


class ModelIdentity(StrictModel):
    """The model that was measured.

    Attributes:
        id: The hub id, or the base name of a local folder; never a path.
        revision: The commit of the hub repository, or the typed revision where none is known; None for a local folder.
        config_sha256: The hash of the fields that make the network; comparable if `rope_sha256` is there.
        architecture: The class name in the configuration.
        dtype: The dtype of the activations, and so of 16-bit layers.
        rope_sha256: The hash of the rotary parameters. None means not recorded, here and below.
        weight_quantization: ``none``, or the method that quantized the weights, such as ``awq``.
        tokenizer_sha256: The hash of the tokenizer and the chat template.
        max_positions: The positions of the model's configuration.
        checkpoint_sha256: The hash of the weights in their files, by a sample of every tensor.
    """

    id: HubId
    revision: Text | None
    config_sha256: Sha256
    architecture: Text
    dtype: Literal["bfloat16", "float16", "float32"]
    rope_sha256: Sha256 | None = None
    weight_quantization: Text | None = None
    tokenizer_sha256: Sha256 | None = None
    max_positions: TokenCount | None = None
    checkpoint_sha256: Sha256 | None = None


class BudgetRecord(StrictModel):
    """The budget of the search as the user wrote it, the ranks and stages that kept it, and what the layers reach.

    Attributes:
        mean_bits: The payload bits per element.
        effective_bits: The stored bits per element on one rank that holds all heads.
        bytes_per_token: The stored bytes of one token, all layers, on one rank that holds all heads.
    """

    asked: Text
    mean_bits: Figure
    effective_bits: Figure
    bytes_per_token: TokenCount
    tp_size: Count
    pp_size: Count

    @property
    def counts_bits(self) -> bool:
        """Whether payload bits were limited, so that a search did not see what padding of rows takes."""
        return self.asked.endswith("bit")


class IntervalRecord(StrictModel):
    """A mean with its bootstrap interval, nats per token."""

    mean: Figure
    low: Figure
    high: Figure

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low must not exceed high, but {self.low} > {self.high}")
        return self


class BaselineRecord(StrictModel):
    """The bits of another scheme, such as ``K4V4 + transforms``, and its KL on the same text, nats per token."""

    name: Text
    mean_bits: Figure
    effective_bits: Figure
    kl_mean: Figure
    kl_low: Figure
    kl_high: Figure


class UniformRecord(StrictModel):
    """The best uniform inside the budget, of the same transforms, grids and window; a baseline by its name.

    Attributes:
        difference: The paired difference, the profile's KL less this one's; below zero the profile is better.
    """

    name: Annotated[str, Field(pattern=r"^K(2|3|4|8|16)V(2|3|4|8|16)( \+ transforms)?$")]
    difference: IntervalRecord


class BudgetPoint(StrictModel):
    """The KL that the additive scores predict for a larger budget, nats per token, and the bits that it would take."""

    mean_bits: Figure
    effective_bits: Figure
    predicted_kl: Figure


class QualityRecord(StrictModel):
    """The measurements on the report split. Each sequence is read at small and at large positions, with equal weight.

    Attributes:
        read_plan: The read plan of the measurement.
        split_tokens: The number of scored tokens of the report split, each counted once.
        predicted_kl: The sum of the additive scores; None where they are not in nats per token.
        kl_p99: The 99th percentile over tokens, the larger of those at small and at large positions.
        top1_agreement: The share of positions whose most likely token is the unquantized model's.
        reference_perplexity: The perplexity of the unquantized model on the same tokens and positions.
        best_uniform: The fair rival; None where no uniform was measured inside the budget.
        larger_budgets: The predictions for larger budgets, ascending; None where nothing was solved.
    """

    metric: Literal["kl_nats_per_token"]
    read_plan: ReadPlanName
    split_tokens: TokenCount
    predicted_kl: Figure | None
    measured_kl: IntervalRecord
    kl_p99: Figure
    top1_agreement: Share
    perplexity: Figure
    reference_perplexity: Figure
    baselines: Annotated[tuple[BaselineRecord, ...], Field(strict=False, max_length=MAX_BASELINES)]
    best_uniform: UniformRecord | None = None
    larger_budgets: Annotated[tuple[BudgetPoint, ...], Field(strict=False, max_length=MAX_BASELINES)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_uniform is None:
            return self
        name, stated = self.best_uniform.name, self.best_uniform.difference.mean
        rivals = [baseline.kl_mean for baseline in self.baselines if baseline.name == name]
        if not rivals:
            raise ValueError(f"best_uniform must be one of the baselines, but is {name!r}")
        kl, difference = self.measured_kl.mean, self.best_uniform.difference
        rounding = KL_ROUNDING * max(abs(difference.low), abs(difference.high))
        if not difference.low - rounding <= stated <= difference.high + rounding:
            raise ValueError(
                f"best_uniform.difference.mean must lie in its interval, but {stated:g} is not in"
                f" [{difference.low:g}, {difference.high:g}]"
            )
        for rival in rivals:
            if abs(kl - rival - stated) > KL_ROUNDING * (abs(kl) + abs(rival) + abs(stated)):
                raise ValueError(
                    f"best_uniform.difference.mean must be the profile's KL less that of {name}, {kl:g} - {rival:g},"
                    f" but is {stated:g}"
                )
        return self


class SplitHashes(StrictModel):
    """The hash of each split's token ids."""

    calibrate: Sha256
    select: Sha256
    report: Sha256


class SplitCounts(StrictModel):
    """The number of sequences in each split."""

    calibrate: TokenCount
    select: TokenCount
    report: TokenCount


class CalibrationRecord(StrictModel):
    """The data that the model was measured on.

    Attributes:
        corpus: The name of the corpus, never a path.
        sequence_length: The number of tokens per sequence.
        position_range: The first and the last position of the statistics.
        score: The score that allocated bits.
    """

    corpus: Name
    token_ids_sha256: SplitHashes
    num_sequences: SplitCounts
    sequence_length: TokenCount
    position_range: Annotated[tuple[TokenCount, TokenCount], Field(strict=False)]
    seed: Seed
    score: Text

    @model_validator(mode="after")
    def _check(self) -> Self:
        first, last = self.position_range
        if first > last:
            raise ValueError(f"position_range must ascend, but is [{first}, {last}]")
        return self


class SearchRecord(StrictModel):
    """The sampler of the refinement, and its number of finished trials."""

    sampler: Text
    trials: TokenCount
    seed: Seed


class Libraries(StrictModel):
    """The versions of libraries at the time of the search."""

    torch: Text
    transformers: Text
    optuna: Text


class Provenance(StrictModel):
    """The origin of the profile; calibration and search are None for a hand-written one.

    Attributes:
        command: The command that makes the same profile from the same data, with the last parts of paths only; None
            where no command searched.
    """

    kvtuner_version: Text
    calibration: CalibrationRecord | None
    search: SearchRecord | None
    libraries: Libraries
    command: Annotated[CommandText, Field(min_length=1)] | None = None
