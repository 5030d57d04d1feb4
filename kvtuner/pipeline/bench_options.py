"""What a benchmark is asked for: options, and which of them go together. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvtuner.bench.loads import LoadOptions
from kvtuner.errors import EndpointError
from kvtuner.pipeline.options import DataOptions, ModelOptions, check_counts, check_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """A benchmark of a profile.

    Attributes:
        profile: The profile's file, run folder or reference.
        model: The model; the profile's where it names none.
        data: The text that prompts are cut from.
        against: The other schemes besides the unquantized one; fp8 where it is None.
        ablation: Whether the ablation's schemes are compared, in quality too.
        levels: The kinds of tasks of the ablation's quality; likelihood and recall where it is None.
        server_args: The flags of ``sglang.launch_server`` that all servers get, as a shell reads them.
        kv_memory: The bytes of every scheme's KV pool; SGLang decides where it is None.
        start_timeout: The seconds that a start may take; 1800 where it is None.
        endpoint: The names of schemes and the URLs of their servers, in place of starting any.
        api: How endpoints are spoken to; sglang where it is None.
        loads: The loads that every scheme is put under.
        timeout: The seconds that one request may take.
        memory_bandwidth: The bytes per second of one GPU's memory; measured where servers are started here.
        seed: The seed of where prompts are cut; the search's where it is None.
        out: The run folder; ``runs/<model>-bench-...`` where it is None.
    """

    profile: str
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    against: tuple[str, ...] | None = None
    ablation: bool = False
    levels: tuple[str, ...] | None = None
    server_args: str = ""
    kv_memory: int | None = None
    start_timeout: int | None = None
    endpoint: tuple[tuple[str, str], ...] | None = None
    api: Literal["sglang", "openai"] | None = None
    loads: LoadOptions = field(default_factory=LoadOptions)
    timeout: int = 600
    memory_bandwidth: float | None = None
    seed: int | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        loads = self.loads
        check_counts(rounds=loads.rounds, repeats=loads.repeats, prompt=loads.prompt, output=loads.output)
        check_counts(timeout=self.timeout, start_timeout=self.start_timeout, kv_memory=self.kv_memory)
        check_seed(self.seed)
        if self.levels and not self.ablation:
            raise EndpointError("--levels is for the quality of --ablation; add it, or run kvtuner eval")
        if self.endpoint:
            self._refuse_flags_of_starts()
        elif self.ablation and self.against:
            raise EndpointError("--ablation says what is compared; leave out --against")
        if self.api and not self.endpoint:
            raise EndpointError("--api is how servers are spoken to; give --endpoint too")

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
