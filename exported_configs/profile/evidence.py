"""What a profile was asked for, what it does and where it comes from: all that the digest does not cover."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from kvtuner.exported_configs.profile.fields import (
    Command,
    Count,
    Figure,
    HubId,
    Name,
    Seed,
    Sha256,
    StrictModel,
    Text,
    TokenCount,
)

ReadPlan = Literal["decode", "hit", "cache"]

MAX_BASELINES: Final = 256


class ModelIdentity(StrictModel):
    """Which model was measured.

    Attributes:
        id: hub id, or the base name of a local folder; never a path.
        revision: commit of the hub repository, or what was typed where none is known; None for a local folder.
        config_sha256: of what makes the network the same one, see `identity`; comparable if `rope_sha256` is there.
        architecture: class name in the configuration.
        dtype: of the activations, and so of 16-bit layers.
        rope_sha256: of the rotary parameters. None, here and below: not recorded.
        weight_quantization: ``none``, or how the weights are quantized, such as ``awq``.
        tokenizer_sha256: of what turns text and chats into token ids.
        max_positions: of the model's configuration.
        checkpoint_sha256: of the weights as they lie in files, by a sample of every tensor; see `checkpoint`.
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
    """What was asked for and what the layers reach.

    Attributes:
        asked: the budget as the user wrote it, or the configuration of a hand-written profile.
        mean_bits: payload bits per element.
        effective_bits: stored bits per element on one rank that holds all heads.
        bytes_per_token: stored bytes of one token, all layers, on one rank that holds all heads.
        tp_size: tensor-parallel ranks that the budget was kept on.
        pp_size: pipeline stages that the budget was kept on.
    """

    asked: Text
    mean_bits: Figure
    effective_bits: Figure
    bytes_per_token: TokenCount
    tp_size: Count
    pp_size: Count


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
    """What another configuration reached on the same text.

    Attributes:
        name: such as ``K4V4``, ``K4V4 + transforms`` or ``fp8``.
        mean_bits: payload bits per element.
        effective_bits: stored bits per element.
        kl_mean: KL from the unquantized model, nats per token; `kl_low` and `kl_high` bound it.
    """

    name: Text
    mean_bits: Figure
    effective_bits: Figure
    kl_mean: Figure
    kl_low: Figure
    kl_high: Figure


class QualityRecord(StrictModel):
    """What was measured on the report split, each sequence read at small and at large positions and both counted alike.

    Attributes:
        read_plan: what read quantized keys and values.
        split_tokens: tokens of the report split that were scored, each counted once.
        predicted_kl: sum of the additive scores; None where they are not in nats per token.
        kl_p99: 99th percentile over tokens, the larger of those at small and at large positions.
        top1_agreement: share of positions whose most likely token is the unquantized model's.
        perplexity: of this configuration.
        reference_perplexity: of the unquantized model on the same tokens and positions.
        baselines: other configurations on the same tokens and positions.
    """

    metric: Literal["kl_nats_per_token"]
    read_plan: ReadPlan
    split_tokens: TokenCount
    predicted_kl: Figure | None
    measured_kl: IntervalRecord
    kl_p99: Figure
    top1_agreement: Annotated[Figure, Field(ge=0, le=1)]
    perplexity: Figure
    reference_perplexity: Figure
    baselines: Annotated[tuple[BaselineRecord, ...], Field(strict=False, max_length=MAX_BASELINES)]


class SplitHashes(StrictModel):
    """Hash of each split's token ids."""

    calibrate: Sha256
    select: Sha256
    report: Sha256


class SplitCounts(StrictModel):
    """Sequences in each split."""

    calibrate: TokenCount
    select: TokenCount
    report: TokenCount


class CalibrationRecord(StrictModel):
    """What the model was measured on.

    Attributes:
        corpus: name of the corpus, never a path.
        sequence_length: tokens per sequence.
        position_range: first and last position that statistics saw.
        score: the score that bits were allocated by.
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
    """How the configuration was found.

    Attributes:
        sampler: of the refinement.
        trials: finished trials of the refinement.
    """

    sampler: Text
    trials: TokenCount
    seed: Seed


class Libraries(StrictModel):
    """Versions at the time of the search."""

    torch: Text
    transformers: Text
    optuna: Text


class Provenance(StrictModel):
    """Where the profile comes from.

    Attributes:
        calibration: None for a hand-written profile.
        search: None for a hand-written profile.
        command: that makes the same profile where the same data is at hand, with the last parts of paths only; None of
            a profile that no command searched for.
    """

    kvtuner_version: Text
    calibration: CalibrationRecord | None
    search: SearchRecord | None
    libraries: Libraries
    command: Annotated[Command, Field(min_length=1)] | None = None
