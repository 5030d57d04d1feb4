"""The keywords of the Python interface, by which type checkers and editors know them. A test compares them to options.

A keyword takes what its flag's text says too, so that numbers with units may be text. Nothing here is imported when
the program runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from kvtuner.calibration.sensitivity import ScoreName
    from kvtuner.precision import ConstantsPlace, Fit, WordChoice
    from kvtuner.read_plan_names import ReadPlanName
    from kvtuner.transforms import TransformChoice
    from kvtuner.tuner.samplers import SamplerName


class ReadKeywords(TypedDict, total=False):
    """The keywords of everything that reads text by a model."""

    revision: str | None
    device: str
    dtype: str
    trust_remote_code: bool
    context_length: int | str | None
    data: str | PathLike[str] | None
    data_config: str | None
    data_split: str
    text_field: str
    sequence_length: int | str | None
    sequences: tuple[int, int, int] | list[int] | int | str | None
    deduplicate: bool
    out: str | PathLike[str] | None


class CalibrateKeywords(ReadKeywords, total=False):
    """The keywords of a calibration."""

    score: ScoreName
    read_plan: ReadPlanName
    fisher_draws: int | str
    batch_size: int | str
    k_group_size: int | str | None
    v_group_size: int | str | None
    symmetric: bool
    fit: Fit
    word_bits: WordChoice
    residual_length: int | str
    sinks: int | str
    transforms: TransformChoice
    three_bits: bool
    pairs: bool
    seed: int | str
    workers: int | str
    tp: int | str
    stream: bool


class SearchKeywords(CalibrateKeywords, total=False):
    """The keywords of a search."""

    layers: str | None
    keep: str | None
    groups: bool
    sampler: SamplerName | None
    trials: int | str | None
    time_limit: int | str | None
    nested: bool
    tp_size: int | str
    pp_size: int | str
    constants: ConstantsPlace
    report: bool
    storage: str | None


class EvalKeywords(ReadKeywords, total=False):
    """The keywords of an evaluation."""

    model: str | PathLike[str] | None
    levels: Sequence[str] | str | None
    read_plan: ReadPlanName | None
    against: Sequence[str] | str | None
    lengths: Sequence[int] | int | str | None
    problems: int | str | None
    questions: int | str | None
    all_questions: bool
    samples: int | str | None
    batch_size: int | str | None
    oracle: bool
    seed: int | str | None
    tasks: Sequence[str] | str | None
    include_path: str | PathLike[str] | None
    limit: int | str | None
    num_fewshot: int | str | None
    apply_chat_template: bool
    endpoint: Mapping[str, str] | Sequence[tuple[str, str]] | None
    api: Literal["sglang", "openai"] | None
    timeout: int | str | None
    positions: int | str | None
    scored_sequences: int | str | None
    top_logprobs: int | str | None


class PlanKeywords(TypedDict, total=False):
    """The keywords of a plan."""

    revision: str | None
    trust_remote_code: bool
    weights: int | str | None
    gpu: str | None
    memory: int | str | None
    tp_size: int | str
    pp_size: int | str
    context_length: int | str | None
    concurrency: int | str | None
    budget: Sequence[str] | str
    residual_length: int | str
    sinks: int | str
