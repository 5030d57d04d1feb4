"""The options of an evaluation, and which of them go together. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from kvtuner.errors import CorpusError, EndpointError
from kvtuner.pipeline.option_types import counts, endpoint, names, positive, seed, several
from kvtuner.pipeline.options import DataOptions, ModelOptions, check_options, option
from kvtuner.read_plan_names import READ_PLANS, ReadPlanName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
"""The defaults of numbers. A number that nothing would read is refused, so options keep None where there is none."""
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


def _number(name: str, text: str, *, type: Callable[[str], int] = positive, **flag: Any) -> Any:
    """A number that stays None where it is not given, as one that nothing would read is refused."""
    return option(None, f"{text}; {EVALUATION_DEFAULTS[name]} by default", type=type, **flag)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """An evaluation of a profile, the file, run folder or reference of which `profile` is.

    What is None, the profile's search, the backends or `EVALUATION_DEFAULTS` say.
    """

    profile: str
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    levels: tuple[str, ...] | None = option(
        None, f"{', '.join(LEVELS)}; all, by default", type=names(LEVELS), group="evaluation", metavar="LEVEL[,...]"
    )
    read_plan: ReadPlanName | None = option(
        None, "read plan: which tokens read quantized keys and values; the search's by default", choices=READ_PLANS
    )
    against: tuple[str, ...] | None = option(
        None,
        "other schemes to store the cache: fp8, or pairs such as K8V8, which is int8; these two by default",
        type=names(),
        metavar="SCHEME[,...]",
    )
    lengths: tuple[int, ...] | None = option(
        None,
        "lengths of recall's and needles' contexts; those of 128, 256, 512, 2048 and 8192 that fit, by default",
        type=counts,
        metavar="TOKENS[,...]",
    )
    problems: int | None = _number("problems", "contexts of every length", type=several)
    questions: int | None = _number("questions", "questions after each context")
    samples: int | None = _number("samples", "prompts that all schemes continue")
    batch_size: int | None = _number("batch_size", "sequences in flight, of likelihood")
    seed: int | None = option(None, "seed of documents, questions and bootstrap; the search's by default", type=seed)
    tasks: tuple[str, ...] | None = option(
        None,
        "tasks, such as gsm8k; those of --include-path too",
        group="tasks of lm-evaluation-harness (pip install 'kvtuner[eval]')",
        type=names(),
        metavar="NAME[,...]",
    )
    include_path: str | None = option(None, "folder of task files; they may run code of their own", metavar="FOLDER")
    limit: int | None = option(None, "questions of each task; all, by default", type=several)
    num_fewshot: int | None = option(None, "examples before a question; the task's own, by default", type=int)
    apply_chat_template: bool = option(False, "put prompts through the tokenizer's chat template")
    endpoint: tuple[tuple[str, str], ...] | None = option(
        None,
        "URL of the server that serves the profile; others as bf16=URL, fp8=URL, K8V8=URL",
        group="servers, in place of a model loaded here",
        type=endpoint,
        action="append",
        metavar="[SCHEME=]URL",
    )
    api: Literal["sglang", "openai"] | None = option(
        None, "interface of the servers; sglang by default", choices=("sglang", "openai")
    )
    timeout: int | None = _number("timeout", "seconds for one answer", metavar="SECONDS")
    positions: int | None = _number("positions", "last positions of a sequence, which servers score", metavar="TOKENS")
    scored_sequences: int | None = _number("scored_sequences", "sequences scored at most", type=several, metavar="N")
    top_logprobs: int | None = _number("top_logprobs", "likely tokens that a truncated KL tells apart", metavar="K")
    out: str | None = option(
        None, "folder that keeps what is asked once; runs/<model>-eval-... by default", group="run", metavar="FOLDER"
    )

    def __post_init__(self) -> None:
        check_options(self)
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
        refused = ["batch_size"] if self.batch_size is not None else []
        refused += [name for name in ("device", "dtype") if getattr(self.model, name) != "auto"]
        if refused:
            flag = _flag(refused[0])
            raise EndpointError(f"{flag} is for a model loaded here, not for servers; leave out {flag} or --endpoint")

    def _first_given(self, names: Sequence[str]) -> str | None:
        values: list[tuple[str, Any]] = [(name, getattr(self, name)) for name in names]
        return next((name for name, value in values if value is not None and value is not False), None)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
