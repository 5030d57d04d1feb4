"""The options of a benchmark, and which of them go together. Imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from kvtuner.bench.loads import LoadOptions
from kvtuner.errors import EndpointError, OptionError
from kvtuner.pipeline.evaluation_options import LEVELS
from kvtuner.pipeline.option_types import counts, endpoint, names, positive, seed
from kvtuner.pipeline.options import DataOptions, ModelOptions, check_options, option

LOADS: Final = LoadOptions()
_UNITS: Final = {None: 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB)?", text)
    value = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if value < 1:
        raise OptionError(f"bytes are written 512MiB or 40GiB, not {text!r}")
    return value


def _gigabytes(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise OptionError(f"must be above 0, not {text}")
    return value * 1e9


def _counts(text: str, **flag: Any) -> Any:
    """Counts that stay None where they are not given, as `LOADS` has them."""
    return option(None, text, type=counts, metavar="TOKENS[,...]", **flag)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """A benchmark of a profile, the file, run folder or reference of which `profile` is.

    Bytes of `kv_memory` are those of every scheme's pool; `memory_bandwidth` is in bytes per second.
    """

    profile: str
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    against: tuple[str, ...] | None = option(
        None,
        "schemes beside bf16: fp8, or pairs such as K8V8; fp8 by default",
        group="what is compared",
        type=names(),
        metavar="SCHEME[,...]",
    )
    ablation: bool = option(False, "bf16, K8V8, K4V4, K2V2, K8V4, per channel, symmetric, fp8: quality and speed")
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
        None, "size of every scheme's KV pool, such as 40GiB; SGLang decides by default", type=_bytes, metavar="BYTES"
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
    lengths: tuple[int, ...] | None = _counts("prompt tokens; those of 10 to 32,000 that fit, by default", group="load")
    outputs: tuple[int, ...] | None = _counts("generated tokens; 16, 64 and 256 by default")
    concurrency: tuple[int, ...] | None = option(
        None, "requests in flight; doubled to what fits, by default", type=counts, metavar="N[,...]"
    )
    batches: tuple[int, ...] | None = option(
        None, "requests sent at one moment; 1 to 16 by default", type=counts, metavar="N[,...]"
    )
    rounds: int = option(LOADS.rounds, "rounds of the same load, for stability", type=positive)
    repeats: int = option(LOADS.repeats, "requests, or batches, at each point", type=positive)
    prompt: int = option(LOADS.prompt, "prompt tokens of loads that do not vary them", type=positive, metavar="TOKENS")
    output: int = option(LOADS.output, "output tokens of loads that do not vary them", type=positive, metavar="TOKENS")
    timeout: int = option(600, "seconds for one request", type=positive, metavar="SECONDS")
    memory_bandwidth: float | None = option(
        None,
        "bandwidth of one GPU's memory, for the gate on tokens per second; measured where servers are started here",
        type=_gigabytes,
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
