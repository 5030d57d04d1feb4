"""The options of an evaluation and of a benchmark, and which of them go together. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal

from kvtuner.bench.loads import LoadOptions
from kvtuner.errors import CorpusError, EndpointError
from kvtuner.exported_configs.scheme_names import FP8, REFERENCE
from kvtuner.pipeline.flags.name_readers import endpoint, names
from kvtuner.pipeline.flags.number_readers import (
    byte_count,
    bytes_per_second,
    counts,
    from_zero,
    positive,
    seed,
    several,
    token_count,
    token_counts,
)
from kvtuner.pipeline.flags.option_fields import check_options, option, option_group
from kvtuner.pipeline.options import DataOptions, ModelOptions
from kvtuner.read_plan_names import READ_PLANS, ReadPlanName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LEVELS: Final = ("likelihood", "recall", "needle", "arithmetic", "samples")
AGAINST: Final = (FP8, "K8V8")
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
_OF_LEVELS: Final[dict[tuple[str, ...], tuple[str, ...]]] = {
    ("recall", "needle", "arithmetic"): ("problems", "questions", "all_questions"),
    ("samples",): ("samples",),
    ("likelihood",): ("batch_size", "positions", "scored_sequences", "top_logprobs"),
}
LOADS: Final = LoadOptions()
_MODEL_TEXTS: Final = {
    "model": "hub id, local folder, or the shipped demo model; the profile's by default",
    "revision": "commit, tag or branch on the hub; the profile's by default, with its model",
    "context_length": "tokens of the context, such as 32k; the search's by default",
}
_DATA_TEXTS: Final = {
    "sequence_length": "tokens per sequence; the search's by default",
    "sequences": "sequences that calibrate and select saw, and that report; the search's by default",
}
"""The help of flags whose gaps the profile's search fills."""


def _number(name: str, text: str, *, type: Callable[[str], int] = positive, **flag: Any) -> Any:
    """A number that stays None where it is not given, as one that nothing would read is refused."""
    return option(None, f"{text}; {EVALUATION_DEFAULTS[name]} by default", type=type, **flag)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """An evaluation of a profile, the file, run folder or reference of which `profile` is.

    What is None, the profile's search, the backends or `EVALUATION_DEFAULTS` say.
    """

    profile: str
    model: ModelOptions = option_group(ModelOptions, **_MODEL_TEXTS)
    data: DataOptions = option_group(DataOptions, **_DATA_TEXTS)
    levels: tuple[str, ...] | None = option(
        None, f"{', '.join(LEVELS)}; all, by default", type=names(LEVELS), group="evaluation", metavar="LEVEL[,...]"
    )
    read_plan: ReadPlanName | None = option(
        None, "read plan: which tokens read quantized keys and values; the search's by default", choices=READ_PLANS
    )
    against: tuple[str, ...] | None = option(
        None,
        "other schemes to store the cache: fp8, pairs such as K8V8, which is int8, or best-uniform, the profile's fair"
        " rival; fp8 and K8V8 by default",
        type=names(),
        metavar="SCHEME[,...]",
    )
    lengths: tuple[int, ...] | None = option(
        None,
        "lengths of recall's and needles' contexts; those of 128, 256, 512, 2048 and 8192 that fit, by default",
        type=token_counts,
        metavar="TOKENS[,...]",
    )
    problems: int | None = _number("problems", "contexts of every length", type=several)
    questions: int | None = _number("questions", "questions after each context")
    all_questions: bool = option(False, "ask every scheme also what the unquantized model is hardly ever right at")
    samples: int | None = _number("samples", "prompts that all schemes continue")
    batch_size: int | None = _number("batch_size", "sequences in flight, of likelihood")
    oracle: bool = option(
        False, "answer by a transformers cache, one after another, in place of the local engine: an independent check"
    )
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
    num_fewshot: int | None = option(None, "examples before a question; the task's own, by default", type=from_zero)
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
        for levels, flags in (*_OF_LEVELS.items(), (lengths, ("lengths",))):
            if (name := self._first_given(flags)) is not None and not set(levels) & set(self.asked_levels):
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
        return self.api == "openai" and REFERENCE not in dict(self.endpoint or ())

    def number(self, name: str) -> int:
        """The number of an option, or its default."""
        value = getattr(self, name)
        return EVALUATION_DEFAULTS[name] if value is None else int(value)

    def _refuse_flags_of_models(self) -> None:
        if (name := self._first_given(("read_plan", "against", "oracle"))) is not None:
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


def _token_counts(text: str, **flag: Any) -> Any:
    """Counts of tokens that stay None where they are not given, as `LOADS` has them."""
    return option(None, text, type=token_counts, metavar="TOKENS[,...]", **flag)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """A benchmark of a profile, the file, run folder or reference of which `profile` is.

    Bytes of `kv_memory` are those of every scheme's pool; `memory_bandwidth` is in bytes per second.
    """

    profile: str
    model: ModelOptions = option_group(ModelOptions, **_MODEL_TEXTS)
    data: DataOptions = option_group(DataOptions, **_DATA_TEXTS)
    against: tuple[str, ...] | None = option(
        None,
        "schemes beside bf16: fp8, pairs such as K8V8, or best-uniform, the profile's fair rival, made from its run"
        " folder; fp8 and, where it can be made, best-uniform by default",
        group="what is compared",
        type=names(),
        metavar="SCHEME[,...]",
    )
    local: bool = option(
        False, "answer in this process, by the local engine and by transformers' generate, without SGLang"
    )
    ablation: bool = option(
        False, "bf16, best-uniform, K8V8, K4V4, K2V2, K8V4, per channel, symmetric, fp8: quality and speed"
    )
    levels: tuple[str, ...] | None = option(
        None,
        "levels of kvtuner eval, for the ablation's quality; likelihood,recall by default",
        type=names(LEVELS),
        metavar="LEVEL[,...]",
    )
    server_args: str = option(
        "",
        "flags of sglang.launch_server, the same for every scheme",
        group="servers, started here one after another",
        metavar="'FLAGS'",
    )
    kv_memory: int | None = option(
        None,
        "size of every scheme's KV pool, such as 40GiB; SGLang decides by default",
        type=byte_count,
        metavar="BYTES",
    )
    start_timeout: int | None = option(None, "seconds for a start; 1800 by default", type=positive, metavar="SECONDS")
    endpoint: tuple[tuple[str, str], ...] | None = option(
        None,
        "URL of a server that is there already, in place of starting any",
        type=endpoint,
        action="append",
        metavar="[SCHEME=]URL",
    )
    api: Literal["sglang", "openai"] | None = option(
        None, "interface of the endpoints; sglang by default", choices=("sglang", "openai")
    )
    lengths: tuple[int, ...] | None = _token_counts(
        "prompt tokens; those of 10 to 32,000 that fit, by default", group="load"
    )
    outputs: tuple[int, ...] | None = _token_counts("generated tokens; 16, 64 and 256 by default")
    concurrency: tuple[int, ...] | None = option(
        None, "requests in flight; doubled to what fits, by default", type=counts, metavar="N[,...]"
    )
    batches: tuple[int, ...] | None = option(
        None, "requests sent at one moment; 1 to 16 by default", type=counts, metavar="N[,...]"
    )
    rounds: int = option(LOADS.rounds, "rounds of the same load, for stability", type=positive)
    repeats: int = option(LOADS.repeats, "requests, or batches, at each point", type=positive)
    prompt_tokens: int = option(
        LOADS.prompt_tokens,
        "prompt tokens of loads that do not vary them",
        type=token_count,
        metavar="TOKENS",
        aliases=("prompt",),
    )
    output_tokens: int = option(
        LOADS.output_tokens,
        "output tokens of loads that do not vary them",
        type=token_count,
        metavar="TOKENS",
        aliases=("output",),
    )
    timeout: int = option(600, "seconds for one request", type=positive, metavar="SECONDS")
    memory_bandwidth: float | None = option(
        None,
        "bandwidth of one GPU's memory, for the gate on tokens per second; measured where servers are started here",
        type=bytes_per_second,
        metavar="GB/S",
    )
    seed: int | None = option(None, "seed of the prompts' places in the text; the search's by default", type=seed)
    out: str | None = option(
        None, "folder of report and figures; runs/<model>-bench-... by default", group="run", metavar="FOLDER"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.levels and not self.ablation:
            raise EndpointError("--levels is for the quality of --ablation; add it, or run kvtuner eval")
        if self.local:
            self._refuse_flags_of_servers()
        if self.endpoint:
            self._refuse_flags_of_starts()
        elif self.ablation and self.against:
            raise EndpointError("--ablation says what is compared; leave out --against")
        if self.api and not self.endpoint:
            raise EndpointError("--api is how servers are spoken to; give --endpoint too")

    @property
    def loads(self) -> LoadOptions:
        """The loads that every scheme is put under."""
        values = {item.name: getattr(self, item.name) for item in fields(LoadOptions)}
        return LoadOptions(**{name: value for name, value in values.items() if value})

    def _refuse_flags_of_starts(self) -> None:
        values = {
            "server-args": self.server_args,
            "kv-memory": self.kv_memory,
            "start-timeout": self.start_timeout,
            "device": self.model.device,
            "dtype": self.model.dtype,
        }
        for flag, value in values.items():
            if value not in (None, "", "auto"):
                raise EndpointError(f"--{flag} is for servers that are started here; leave out --endpoint")
        if self.against or self.ablation:
            raise EndpointError("--against and --ablation start servers; other endpoints are named, as in fp8=URL")

    def _refuse_flags_of_servers(self) -> None:
        for name in ("endpoint", "server_args", "start_timeout", "ablation"):
            if getattr(self, name):
                raise EndpointError(f"{_flag(name)} is for servers; leave out that or --local")
