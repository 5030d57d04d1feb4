"""The options of a search or a calibration: every one once, with its default, its check and its flag.

Imports nothing heavy. The fields of these classes are flags and parameters: see `kvtuner.pipeline.flags`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from kvtuner.errors import BudgetError, SearchSpaceError
from kvtuner.pipeline.flags.number_readers import (
    positive,
    second_count,
    seed,
    sequences,
    token_count,
    tokens_up_to,
    window_length,
)
from kvtuner.pipeline.flags.option_fields import check_options, option
from kvtuner.precision import (
    CONSTANTS_PLACES,
    FITS,
    MAX_SINKS,
    WORD_CHOICES,
    ConstantsPlace,
    ExactWindow,
    Fit,
    WordChoice,
)
from kvtuner.read_plan_names import READ_PLANS, ReadPlanName
from kvtuner.transforms import TRANSFORM_CHOICES, TransformChoice

if TYPE_CHECKING:
    from kvtuner.calibration.sensitivity import ScoreName
    from kvtuner.tuner.samplers import SamplerName

SCORES: Final = ("kl", "fisher", "e_o")
SAMPLERS: Final = ("nsga2", "tpe", "random", "none")
DEFAULT_SAMPLER: Final = "nsga2"
DEFAULT_TRIALS: Final = 50
"""The refinement's size where none is given; `SearchOptions` keeps None, since hand-written layers refuse both."""
DEFAULT_RESIDUAL_LENGTH: Final = 32
_SEARCH_ONLY: Final = ("keep", "groups", "nested", "sampler", "trials", "time_limit", "storage")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """The model, and how it is loaded; a profile or the model itself fills what is None."""

    model: str | None = option(None, "hub id, local folder, or the shipped demo model", metavar="ID|FOLDER|demo")
    revision: str | None = option(None, "commit, tag or branch on the hub")
    device: str = option(
        "auto", "torch device: auto (every GPU with accelerate, else the first; the CPU without any), cpu, cuda, cuda:N"
    )
    dtype: str = option("auto", "dtype of the model: auto, float32, float16 or bfloat16")
    trust_remote_code: bool = option(False, "run code that comes with the checkpoint")
    context_length: int | None = option(
        None,
        "context that will be served, such as 32k; the model's maximum by default",
        type=token_count,
        metavar="TOKENS",
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """The text that is read, and how it is cut into sequences; the model decides what is None."""

    data: str | None = option(
        None,
        "text, JSONL with text or messages, or a datasets id; a shipped demo corpus by default",
        metavar="FILE|FOLDER|ID[@REV]",
    )
    data_config: str | None = option(None, "configuration of the datasets id")
    data_split: str = option("train", "split of the datasets id")
    text_field: str = option("text", "field that holds the text")
    sequence_length: int | None = option(
        None,
        "tokens per sequence; 512 for demo, else 2048 or the context if that is less",
        type=token_count,
        metavar="TOKENS",
    )
    sequences: tuple[int, int, int] | None = option(
        None,
        "sequences to calibrate, select and report on; 16,12,12 for demo, else 16,8,16",
        type=sequences,
        metavar="N[,N,N]",
    )
    deduplicate: bool = option(False, "drop repeated documents instead of refusing them")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementOptions:
    """The options of a measurement of sensitivity."""

    score: ScoreName = option(
        "kl", "score that bits are allocated by; fisher and e_o skip the isolated forwards", choices=SCORES
    )
    read_plan: ReadPlanName = option(
        "decode", "read plan: which tokens read quantized keys and values", choices=READ_PLANS
    )
    fisher_draws: int = option(4, "sampled labels per token", type=positive, metavar="R")
    batch_size: int = option(1, "sequences in flight", type=positive)
    k_group_size: int | None = option(
        None, "channels per scale of keys; head_dim by default", type=positive, metavar="CHANNELS"
    )
    v_group_size: int | None = option(
        None, "channels per scale of values; head_dim by default", type=positive, metavar="CHANNELS"
    )
    symmetric: bool = option(False, "one grid around zero instead of minimum and scale")
    fit: Fit = option("least_squares", "fit of every grid: to the range, or by least squares", choices=FITS)
    word_bits: WordChoice = option(
        "auto",
        "bits of a group's scale and minimum together; auto: for keys and for values 32 in groups of a head or 16 in"
        " groups of half a head,"
        " which take equal bytes, if measured KL falls by a tenth (heads of 2^n channels); with a group size given, 16"
        " if rows get shorter",
        choices=WORD_CHOICES,
    )
    residual_length: int | Literal["auto"] = option(
        DEFAULT_RESIDUAL_LENGTH,
        "last tokens of a request that are kept exactly too, beside their rows; auto: the length with the least"
        " measured KL at equal bytes in the served context",
        type=window_length,
        metavar="TOKENS|auto",
    )
    sinks: int = option(
        0,
        "first tokens of a request that are kept exactly too",
        type=tokens_up_to(MAX_SINKS),
        metavar="TOKENS",
    )
    transforms: TransformChoice = option(
        "all",
        "transforms of keys and values to choose from: all, hadamard alone, or none, as other tools' files need",
        choices=TRANSFORM_CHOICES,
    )
    three_bits: bool = option(True, "also measure 3 bits, and offer them to the search")
    pairs: bool = option(False, "also measure the paper's e_o of all K/V pairs")
    seed: int = option(0, "seed of documents, offsets, labels, sampler and bootstrap", type=seed)

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def window(self) -> ExactWindow:
        """The exact window of everything that is measured; a length that is still to be measured is 0."""
        return ExactWindow(0 if self.residual_length == "auto" else self.residual_length, self.sinks)


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateOptions:
    """A calibration; its run folder is ``runs/<model>-...`` where `out` is None."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    measurement: MeasurementOptions = field(default_factory=MeasurementOptions)
    out: str | None = None
    workers: int = option(
        1,
        "processes on this machine that measure together, each with a GPU or its share of the cores; the result is the"
        " same",
        group="workers",
        type=positive,
    )
    tp: int = option(
        1,
        "processes of torchrun that hold the model together while it is measured, each with a GPU and a part of every"
        " layer; for models that do not fit one GPU",
        type=positive,
        metavar="RANKS",
    )
    stream: bool = option(
        False, "leave the model's layers in its files and load one after another; for models that do not fit in memory"
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions(CalibrateOptions):
    """A search: a calibration, and the profiles that are made of it."""

    budget: tuple[str, ...] = option(
        (),
        "limits on the cache: 4bit, 4.25bpe, 35%%, 18KiB/token, 40GiB@32x64k; several make several profiles",
        group="search",
        nargs="+",
        action="extend",
        metavar="BUDGET",
    )
    layers: str | None = option(
        None, "write this configuration instead of searching: 0-1:bf16,2-27:K4V2", metavar="RANGES"
    )
    keep: str | None = option(None, "layers to keep as given: 0:K8V8,27:16", metavar="LAYERS")
    groups: bool = option(False, "tie layers by DBSCAN as the KVTuner paper does")
    sampler: SamplerName | None = option(
        None,
        f"sampler of the refinement; none measures the warm starts only; {DEFAULT_SAMPLER} by default",
        choices=SAMPLERS,
    )
    trials: int | None = option(
        None, f"trials of the refinement, warm starts included; {DEFAULT_TRIALS} by default", type=positive
    )
    time_limit: int | None = option(
        None,
        "time that the search may take: refinement ends early, with the trials that fit beside all the rest",
        type=second_count,
        metavar="10min",
    )
    nested: bool = option(False, "nested budgets: a larger one never takes bits away; needs --sampler none")
    tp_size: int = option(
        1, "tensor-parallel ranks that will serve, beside which --tp is of the search's own processes", type=positive
    )
    pp_size: int = option(1, "pipeline stages that will serve; each keeps the budget", type=positive)
    constants: ConstantsPlace = option(
        "auto",
        "place of mu and lambda: the profile's own file, one beside it, or the first while it can hold them",
        choices=CONSTANTS_PLACES,
    )
    report: bool = option(True, "write report.html and its pictures (kvtuner report does so later)")
    storage: str | None = option(
        None,
        "Optuna storage to share between workers, SQLite in the run folder by default; a database such as"
        " postgresql+psycopg://... has the measurements too",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if bool(self.budget) == bool(self.layers):
            raise BudgetError("give --budget (such as 4bit) or --layers (such as 0-1:bf16,2-27:K4V2), one of the two")
        for name in _SEARCH_ONLY if self.layers else ():
            if getattr(self, name):
                flag = name.replace("_", "-")
                raise SearchSpaceError(
                    f"--{flag} is of a search, but --layers writes one configuration; leave one out, here or in"
                    " --config"
                )
        if self.nested and self.sampler != "none":
            raise SearchSpaceError("--nested keeps the exact family, which refinement would break; add --sampler none")

    @property
    def refinement_sampler(self) -> SamplerName:
        """The sampler that refines."""
        return self.sampler or DEFAULT_SAMPLER

    @property
    def refinement_trials(self) -> int:
        """The trials that the refinement runs, warm starts included."""
        return self.trials or DEFAULT_TRIALS
