"""The options of what fits a GPU in a search's report. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from kvtuner.errors import OptionError
from kvtuner.pipeline.flags.number_readers import byte_count, positive, token_count
from kvtuner.pipeline.flags.option_fields import check_options, option
from kvtuner.pipeline.planning.gpus import gpu_name


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOptions:
    """The GPUs and the requests that a report counts for; without a GPU nothing else may be given.

    What is None, the search says: ranks, context, and the model.
    """

    gpu: str | None = option(
        None, "name of each GPU, such as H100", type=gpu_name, metavar="NAME", group="what fits GPUs, as kvtuner plan"
    )
    memory: int | None = option(
        None, "memory of each GPU, such as 80GiB, by default that of --gpu", type=byte_count, metavar="BYTES"
    )
    tp_size: int | None = option(
        None, "tensor-parallel ranks that will serve; the search's by default", type=positive, aliases=("tp",)
    )
    pp_size: int | None = option(
        None, "pipeline stages that will serve; the search's by default", type=positive, aliases=("pp",)
    )
    context_length: int | None = option(
        None,
        "tokens of each request, such as 32k; the search's by default",
        type=token_count,
        aliases=("context",),
        metavar="TOKENS",
    )
    concurrency: int | None = option(
        None, "requests that the server runs at once at most", type=positive, metavar="REQUESTS"
    )
    weights: int | None = option(
        None,
        "bytes of the weights as they are served, such as 14GiB; counted from safetensors files by default",
        type=byte_count,
        metavar="BYTES",
    )
    model: str | None = option(
        None, "hub id or local folder of the model; the profile's by default", metavar="ID|FOLDER|demo"
    )
    trust_remote_code: bool = option(False, "run code that comes with the checkpoint")

    def __post_init__(self) -> None:
        check_options(self)
        given = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("gpu", "memory")}
        others = [name for name, value in given.items() if value not in (None, False)]
        if others and not self.is_asked:
            raise OptionError(
                f"--{others[0].replace('_', '-')} is of what fits a GPU; give --gpu too, such as H100, or --memory,"
                " such as 80GiB"
            )

    @property
    def is_asked(self) -> bool:
        """Whether a GPU, or its memory, is given."""
        return self.gpu is not None or self.memory is not None
