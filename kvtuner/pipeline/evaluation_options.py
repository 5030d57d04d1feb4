"""What an evaluation is asked for: options, and which of them go together. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from kvtuner.errors import CorpusError, EndpointError
from kvtuner.pipeline.options import DataOptions, ModelOptions, check_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.forward.read_plan import ReadPlanName

LEVELS: Final = ("likelihood", "recall", "needle", "arithmetic", "samples")
AGAINST: Final = ("fp8", "K8V8")
EVALUATION_DEFAULTS: Final = {
    "problems": 10,
    "questions": 4,
    "samples": 3,
    "batch_size": 1,
    "timeout": 120,
    "positions": 32,
    "scored_sequences": 8,
    "top_logprobs": 20,
}
"""The numbers where none are given. One that nothing would read is refused, so that None means not given."""
_OF_SERVERS: Final = ("positions", "scored_sequences", "top_logprobs", "timeout")
_OF_TASKS: Final = ("include_path", "limit", "num_fewshot", "apply_chat_template")
_OF_LEVELS: Final[dict[str, tuple[str, ...]]] = {
    "problems": ("recall", "needle", "arithmetic"),
    "questions": ("recall", "needle", "arithmetic"),
    "samples": ("samples",),
    "batch_size": ("likelihood",),
    "positions": ("likelihood",),
    "scored_sequences": ("likelihood",),
    "top_logprobs": ("likelihood",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """An evaluation of a profile; numbers that are None have those of `EVALUATION_DEFAULTS`.

    Attributes:
        profile: The profile's file, run folder or reference.
        model: The model; the profile's where it names none.
        data: The text; cut like the search's where nothing is given.
        levels: The kinds of tasks, of `LEVELS`; all that the backends can answer where it is None.
        read_plan: What tokens read quantized keys and values; the search's where it is None.
        against: The other schemes; `AGAINST` where it is None.
        lengths: The lengths of recall's and needles' contexts; those that fit where it is None.
        problems: The contexts of every length.
        questions: The questions after each context.
        samples: The prompts that all schemes continue.
        batch_size: The sequences in flight, of likelihood.
        seed: The seed of documents, questions and bootstrap; the search's where it is None.
        tasks: The tasks of lm-evaluation-harness.
        include_path: The folder of further task files.
        limit: The questions of each task; all where it is None.
        num_fewshot: The examples before a question; the task's own where it is None.
        apply_chat_template: Whether prompts go through the tokenizer's chat template.
        endpoint: The names of schemes and the URLs of their servers, in place of a model loaded here.
        api: How servers are spoken to; sglang where it is None.
        timeout: The seconds that a server may take for one answer.
        positions: The last tokens of each sequence that servers score.
        scored_sequences: The sequences that servers score at most.
        top_logprobs: The likely tokens that a truncated KL tells apart.
        out: The run folder; ``runs/<model>-eval-...`` where it is None.
    """

    profile: str
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    levels: tuple[str, ...] | None = None
    read_plan: ReadPlanName | None = None
    against: tuple[str, ...] | None = None
    lengths: tuple[int, ...] | None = None
    problems: int | None = None
    questions: int | None = None
    samples: int | None = None
    batch_size: int | None = None
    seed: int | None = None
    tasks: tuple[str, ...] | None = None
    include_path: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    endpoint: tuple[tuple[str, str], ...] | None = None
    api: Literal["sglang", "openai"] | None = None
    timeout: int | None = None
    positions: int | None = None
    scored_sequences: int | None = None
    top_logprobs: int | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if not self.endpoint:
            if self.api is not None:
                raise EndpointError("--api is how servers are spoken to; give --endpoint too")
            if (name := self._first_given(_OF_SERVERS)) is not None:
                raise EndpointError(f"{_flag(name)} is for servers; give --endpoint too")
        else:
            self._refuse_flags_of_models()
        if not self.tasks and (name := self._first_given(_OF_TASKS)) is not None:
            raise CorpusError(f"{_flag(name)} is for tasks of lm-evaluation-harness; give --tasks too, or leave it out")
        # A model loaded here begins a context at any position, so that no text stands before additions.
        lengths = ("recall", "needle", "arithmetic") if self.endpoint else ("recall", "needle")
        for name, levels in {**_OF_LEVELS, "lengths": lengths}.items():
            if getattr(self, name) is not None and not set(levels) & set(self.asked_levels):
                raise CorpusError(
                    f"{_flag(name)} is for --levels {' or '.join(levels)}; ask for that too, or leave it out"
                )

    @property
    def asked_levels(self) -> tuple[str, ...]:
        """The levels, by default without likelihoods where no server could compare them."""
        if self.levels:
            return self.levels
        return tuple(level for level in LEVELS if level != "likelihood" or not self.lacks_likelihood)

    @property
    def lacks_likelihood(self) -> bool:
        """Whether servers name likely tokens only, and none of them is the unquantized one."""
        return self.api == "openai" and "bf16" not in dict(self.endpoint or ())

    def number(self, name: str) -> int:
        """The number of an option, or its default."""
        value = getattr(self, name)
        return EVALUATION_DEFAULTS[name] if value is None else int(value)

    def _refuse_flags_of_models(self) -> None:
        if (name := self._first_given(("read_plan", "against"))) is not None:
            raise EndpointError(
                f"{_flag(name)} is for a model loaded here; what servers read is set when they are started, and"
                " other schemes are other endpoints, such as fp8=URL"
            )
        given = ["batch_size"] if self.batch_size is not None else []
        given += [name for name in ("device", "dtype") if getattr(self.model, name) != "auto"]
        if given:
            flag = _flag(given[0])
            raise EndpointError(f"{flag} is for a model loaded here, not for servers; leave out {flag} or --endpoint")

    def _first_given(self, names: Sequence[str]) -> str | None:
        """The first option that is given: neither None nor a switch that is off."""
        values: list[tuple[str, Any]] = [(name, getattr(self, name)) for name in names]
        return next((name for name, value in values if value is not None and value is not False), None)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
