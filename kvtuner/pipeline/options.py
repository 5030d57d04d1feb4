"""What a search or a calibration is asked for: every option with its default, checked once. Imports nothing heavy.

The command line and the Python interface both make these classes, with `options_from`: a field is called like its flag,
and options in a field of options are flags of their own. Knows nothing of how flags are written.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from kvtuner.errors import BudgetError, OptionError, SearchSpaceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtuner.calibration.forward.read_plan import ReadPlanName
    from kvtuner.calibration.sensitivity import ScoreName
    from kvtuner.tuner.samplers import SamplerName

SCORES: Final = ("kl", "fisher", "e_o")
READ_PLANS: Final = ("decode", "hit", "cache")
SAMPLERS: Final = ("nsga2", "tpe", "random", "none")
DEFAULT_SAMPLER: Final = "nsga2"
DEFAULT_TRIALS: Final = 100
"""The refinement's size where none is given; `SearchOptions` keeps None, since hand-written layers refuse both."""
MAX_SEED: Final = 2**31
MIN_REPORT_SEQUENCES: Final = 2
"""An interval needs two."""
_SEARCH_ONLY: Final = ("keep", "groups", "nested", "sampler", "trials", "storage")

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """The model, and how it is loaded.

    Attributes:
        model: The hub id, the folder, or ``demo``; None where a profile names it.
        revision: The commit, tag or branch on the hub.
        device: ``auto`` (every GPU, else the CPU) or a torch device.
        dtype: ``auto`` or the name of a torch dtype.
        trust_remote_code: Whether code that comes with the checkpoint runs.
        context_length: The tokens that will be served; the model's maximum where it is None.
    """

    model: str | None = None
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    context_length: int | None = None

    def __post_init__(self) -> None:
        check_counts(context_length=self.context_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """The text that is read, and how it is cut into sequences.

    Attributes:
        data: The file, folder or datasets id; the shipped demo corpus where it is None.
        data_config: The configuration of the datasets id.
        data_split: The split of the datasets id.
        text_field: The field of a row that holds the text.
        sequence_length: The tokens of a sequence; None leaves it to the model.
        sequences: The sequences to calibrate, select and report on; None leaves them to the model.
        deduplicate: Whether repeated documents are dropped instead of refused.
    """

    data: str | None = None
    data_config: str | None = None
    data_split: str = "train"
    text_field: str = "text"
    sequence_length: int | None = None
    sequences: tuple[int, int, int] | None = None
    deduplicate: bool = False

    def __post_init__(self) -> None:
        check_counts(sequence_length=self.sequence_length)
        if self.sequences is None:
            return
        if len(self.sequences) != 3 or min(self.sequences) < 1 or self.sequences[2] < MIN_REPORT_SEQUENCES:
            raise OptionError(
                "sequences must be three counts (calibrate, select, report), at least 1, 1 and"
                f" {MIN_REPORT_SEQUENCES}, not {self.sequences}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementOptions:
    """How sensitivity is measured.

    Attributes:
        score: The score that bits are allocated by.
        read_plan: The plan that says which tokens read quantized keys and values.
        fisher_draws: The sampled labels per token of the Fisher score.
        batch_size: The sequences in flight.
        k_group_size: The channels per scale of keys; head_dim where it is None.
        v_group_size: The channels per scale of values; head_dim where it is None.
        symmetric: Whether one grid around zero replaces minimum and scale.
        pairs: Whether the paper's e_o of all pairs is measured too.
        seed: The seed of documents, offsets, labels, sampler and bootstrap.
    """

    score: ScoreName = "kl"
    read_plan: ReadPlanName = "decode"
    fisher_draws: int = 4
    batch_size: int = 1
    k_group_size: int | None = None
    v_group_size: int | None = None
    symmetric: bool = False
    pairs: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("score", self.score, SCORES)
        check_choice("read_plan", self.read_plan, READ_PLANS)
        check_counts(
            fisher_draws=self.fisher_draws,
            batch_size=self.batch_size,
            k_group_size=self.k_group_size,
            v_group_size=self.v_group_size,
        )
        check_seed(self.seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateOptions:
    """A calibration.

    Attributes:
        model: The model.
        data: The text.
        measurement: How it is measured.
        out: The run folder; ``runs/<model>-...`` where it is None.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    measurement: MeasurementOptions = field(default_factory=MeasurementOptions)
    out: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions(CalibrateOptions):
    """A search: a calibration, and the profiles that are made of it.

    Attributes:
        budget: The budgets; each makes a profile.
        layers: The configuration to write instead of searching.
        keep: The layers whose pairs are forced.
        groups: Whether layers are tied by DBSCAN.
        sampler: The sampler of the refinement; `DEFAULT_SAMPLER` where it is None.
        trials: The trials of the refinement; `DEFAULT_TRIALS` where it is None.
        nested: Whether a larger budget never takes bits away.
        tp_size: The tensor-parallel ranks that will serve.
        pp_size: The pipeline stages that will serve.
        report: Whether the report is written.
        storage: The URL of an Optuna storage; SQLite in the run folder where it is None.
    """

    budget: tuple[str, ...] = ()
    layers: str | None = None
    keep: str | None = None
    groups: bool = False
    sampler: SamplerName | None = None
    trials: int | None = None
    nested: bool = False
    tp_size: int = 1
    pp_size: int = 1
    report: bool = True
    storage: str | None = None

    def __post_init__(self) -> None:
        if bool(self.budget) == bool(self.layers):
            raise BudgetError("give --budget (such as 4bit) or --layers (such as 0-1:bf16,2-27:K4V2), one of the two")
        for name in _SEARCH_ONLY if self.layers else ():
            if getattr(self, name):
                raise SearchSpaceError(
                    f"--{name} is of a search, but --layers writes one configuration; leave one out, here or in"
                    " --config"
                )
        if self.nested and self.sampler != "none":
            raise SearchSpaceError("--nested keeps the exact family, which refinement would break; add --sampler none")
        if self.sampler is not None:
            check_choice("sampler", self.sampler, SAMPLERS)
        check_counts(trials=self.trials, tp_size=self.tp_size, pp_size=self.pp_size)

    @property
    def refinement_sampler(self) -> SamplerName:
        """The sampler that refines."""
        return self.sampler or DEFAULT_SAMPLER

    @property
    def refinement_trials(self) -> int:
        """The trials that the refinement runs, warm starts included."""
        return self.trials or DEFAULT_TRIALS


def options_from(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """Options out of values by the name of their flag: a field that they lack has its default, others are left alone.

    Args:
        kind: A dataclass of options.
        values: The values of its fields, and of those of options that it holds, in one mapping.
    """
    found = {}
    for item in _fields(kind):
        if _is_nested(item):
            found[item.name] = options_from(cast("type[Any]", item.default_factory), values)
        elif item.name in values:
            value = values[item.name]
            found[item.name] = tuple(value) if isinstance(value, list) else value
    return kind(**found)


def flag_values(options: object) -> dict[str, Any]:
    """The values of all fields by the name of their flag, with those of options that a field holds."""
    values = {}
    for item in _fields(type(options)):
        value = getattr(options, item.name)
        values.update(flag_values(value) if _is_nested(item) else {item.name: value})
    return values


def defaults_of(kind: type) -> dict[str, Any]:
    """The defaults of a dataclass of options by the name of their flag, without fields that have none."""
    defaults = {}
    for item in _fields(kind):
        if _is_nested(item):
            defaults.update(defaults_of(cast("type", item.default_factory)))
        elif item.default is not MISSING:
            defaults[item.name] = item.default
    return defaults


def flag_names(kind: type) -> set[str]:
    """The names of all flags of a dataclass of options, with those of options that a field holds."""
    names: set[str] = set()
    for item in _fields(kind):
        names |= flag_names(cast("type", item.default_factory)) if _is_nested(item) else {item.name}
    return names


def check_counts(**counts: int | None) -> None:
    """Check that counts are at least 1, or None.

    Raises:
        OptionError: One is not; it is named as it was passed.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            raise OptionError(f"{name} must be at least 1, not {count}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Check that a value is one of the choices.

    Raises:
        OptionError: It is none of them.
    """
    if value not in choices:
        raise OptionError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def check_seed(seed: int | None) -> None:
    """Check a seed.

    Raises:
        OptionError: It is negative or too large.
    """
    if seed is not None and not 0 <= seed < MAX_SEED:
        raise OptionError(f"seed must be within 0..{MAX_SEED - 1}, not {seed}")


def _fields(kind: Any) -> tuple[Field[Any], ...]:
    return fields(kind)


def _is_nested(item: Field[Any]) -> bool:
    return is_dataclass(item.default_factory)
