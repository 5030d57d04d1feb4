"""The options of a plan, and which of them go together. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtuner.errors import OptionError
from kvtuner.pipeline.flags.number_readers import byte_count, positive, token_count, tokens_up_to
from kvtuner.pipeline.flags.option_fields import check_options, option
from kvtuner.pipeline.options import DEFAULT_RESIDUAL_LENGTH, MeasurementOptions, ModelOptions, SearchOptions
from kvtuner.pipeline.planning.gpus import gpu_name
from kvtuner.precision import GIB, MAX_RESIDUAL_LENGTH, MAX_SINKS

PLANNED_BUDGETS: Final = ("2.5bit", "3bit", "4bit", "6bit")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """A plan: the model, the GPUs that will serve it, the requests, and the schemes to compare."""

    model: str | None = option(None, "hub id, local folder, or the shipped demo model", metavar="ID|FOLDER|demo")
    revision: str | None = option(None, "commit, tag or branch on the hub")
    trust_remote_code: bool = option(False, "run code that comes with the checkpoint")
    weights: int | None = option(
        None,
        "bytes of the weights as they are served, such as 14GiB; counted from safetensors files by default",
        type=byte_count,
        metavar="BYTES",
    )
    gpu: str | None = option(
        None, "name of each GPU, such as H100", type=gpu_name, metavar="NAME", group="what will serve"
    )
    memory: int | None = option(
        None,
        "memory of each GPU, such as 80GiB, by default that of --gpu",
        type=byte_count,
        metavar="BYTES",
    )
    tp_size: int = option(1, "tensor-parallel ranks that will serve", type=positive, aliases=("tp",))
    pp_size: int = option(1, "pipeline stages that will serve", type=positive, aliases=("pp",))
    context_length: int | None = option(
        None,
        "tokens of each request, such as 32k; the model's maximum by default",
        type=token_count,
        aliases=("context",),
        metavar="TOKENS",
    )
    concurrency: int | None = option(
        None, "requests of that context that should fit at once", type=positive, metavar="REQUESTS"
    )
    budget: tuple[str, ...] = option(
        (),
        f"budgets to compare, as kvtuner search takes them; {' '.join(PLANNED_BUDGETS)} by default",
        group="how the cache is stored",
        nargs="+",
        action="extend",
        metavar="BUDGET",
    )
    residual_length: int = option(
        DEFAULT_RESIDUAL_LENGTH,
        "last tokens of a request that are kept exactly too, beside their rows",
        type=tokens_up_to(MAX_RESIDUAL_LENGTH),
        metavar="TOKENS",
    )
    sinks: int = option(
        0, "first tokens of a request that are kept exactly too", type=tokens_up_to(MAX_SINKS), metavar="TOKENS"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.gpu is None and self.memory is None:
            raise OptionError("give --gpu, such as H100, or --memory, such as 80GiB")
        if self.memory is not None and self.memory < GIB:
            raise OptionError("--memory must be at least 1GiB, such as 80GiB")

    @property
    def budgets(self) -> tuple[str, ...]:
        """The budgets to compare."""
        return self.budget or PLANNED_BUDGETS

    def search_options(self, *budgets: str) -> SearchOptions:
        """The options of a search for budgets, besides defaults."""
        return SearchOptions(
            model=ModelOptions(
                model=self.model,
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
                context_length=self.context_length,
            ),
            measurement=MeasurementOptions(residual_length=self.residual_length, sinks=self.sinks),
            budget=budgets or self.budgets,
            tp_size=self.tp_size,
            pp_size=self.pp_size,
        )
