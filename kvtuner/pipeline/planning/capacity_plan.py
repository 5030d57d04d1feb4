"""A plan: the tokens and requests that fit by each cache scheme, the cheapest that suffices, and the search for it."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvtuner.calibration.model_loading import ModelShape, ModelSource, read_shape
from kvtuner.errors import GeometryError, ServingError
from kvtuner.exported_configs.scheme_names import FP8, REFERENCE
from kvtuner.pipeline.flags.option_fields import defaults_of
from kvtuner.pipeline.planning.gpus import find_gpu
from kvtuner.pipeline.planning.plan_options import PlanOptions
from kvtuner.pipeline.planning.scheme_capacity import SchemeCapacity, SchemeSizes
from kvtuner.pipeline.planning.search_cost import SearchCost, search_cost
from kvtuner.pipeline.planning.served_weights import ServedWeights, served_weights
from kvtuner.pipeline.planning.server_memory import ServerMemory, size_text
from kvtuner.pipeline.planning.state_cost import state_cost
from kvtuner.pipeline.stages.search_run import calibration_options
from kvtuner.precision import MIB, ExactWindow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.quantization_options import QuantizationOptions


@dataclass(frozen=True, slots=True)
class Advice:
    """The cheapest scheme for the requests asked for, or for one where nobody asked for more.

    Attributes:
        choice: The name of bf16 or fp8 where they suffice, ``search``, or ``none`` where nothing does.
        budgets: The budgets to search for, as `kvtuner search` takes them.
        effective_bits: The stored bits of an element in the largest budget that suffices.
        tp_size: The least tensor-parallel ranks that would suffice, where these do not and more do.
    """

    choice: Literal["bf16", "fp8", "search", "none"]
    budgets: tuple[str, ...] = ()
    effective_bits: float | None = None
    tp_size: int | None = None


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """A plan with all that it was made of; the search is None where none is needed or would help."""

    options: PlanOptions
    shape: ModelShape
    weights: ServedWeights
    server: ServerMemory
    schemes: tuple[SchemeCapacity, ...]
    advice: Advice
    search: SearchCost | None

    @property
    def search_command(self) -> str | None:
        """The command of the search, None where there is none."""
        if self.search is None:
            return None
        options = self.options
        words = ["kvtuner", "search", "--model", str(options.model)]
        words += ["--revision", options.revision] if options.revision else []
        words += ["--trust-remote-code"] * options.trust_remote_code
        words += ["--budget", *self.advice.budgets]
        defaults = defaults_of(PlanOptions)
        for name in ("context_length", "tp_size", "pp_size", "residual_length", "sinks"):
            if (value := getattr(options, name)) != defaults[name]:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join(words)

    @property
    def server_flags(self) -> str:
        """The flags of `sglang.launch_server` that the figures hold for."""
        options = self.options
        flags = {"--tp-size": options.tp_size, "--pp-size": options.pp_size}
        words = [f"{flag} {value}" for flag, value in flags.items() if value > 1]
        words.append(f"--context-length {self.shape.context_length}")
        # A budget for a number of requests holds the copies of so many.
        running = options.concurrency or (1 if self.advice.effective_bits is not None else None)
        words += [f"--max-running-requests {running}"] if running else []
        return " ".join(words)

    @property
    def window(self) -> ExactWindow:
        """The exact window of the search."""
        return ExactWindow(self.options.residual_length, self.options.sinks)

    @property
    def has_refused_copies(self) -> bool:
        """Whether a server would refuse to start by some scheme, whose copies take most of the memory."""
        return any(not row.tokens and row.copies_bytes_per_request for row in self.schemes)

    def to_json(self) -> dict[str, Any]:
        """The plan for a program."""
        options, server = self.options, self.server
        return {
            "model": options.model,
            "architecture": self.shape.architecture,
            "geometry": self.shape.geometry.as_dict(),
            "context_length": self.shape.context_length,
            "concurrency": options.concurrency,
            "gpu": options.gpu,
            "tp_size": options.tp_size,
            "pp_size": options.pp_size,
            "memory_bytes": server.memory_mib * MIB,
            "kept_bytes": server.kept_bytes,
            "mem_fraction_static": server.static_fraction,
            "weights": asdict(self.weights),
            "rank_weights_bytes": server.rank_weights_bytes,
            "pool_bytes": server.pool_bytes,
            "states": None if server.states is None else {**asdict(server.states), "count": server.num_states},
            "window": {"residual_length": options.residual_length, "sinks": options.sinks},
            "schemes": [asdict(row) for row in self.schemes],
            "advice": asdict(self.advice),
            "server_flags": self.server_flags,
            "search_command": self.search_command,
            "search": None if self.search is None else self.search.to_json(),
        }


def make_plan(options: PlanOptions) -> CapacityPlan:
    """Plan for a model; reads its configuration and the headers of its checkpoint.

    Raises:
        UnsupportedModelError: A model that no search takes, a context beyond its own, or no safetensors files.
        GeometryError: Ranks that the model cannot be split over.
        BudgetError: A budget that the model cannot keep.
        ServingError: The weights do not fit.
        HubError: The hub cannot be asked.
    """
    search = options.search_options()
    source = ModelSource(
        str(options.model), options.revision, trust_remote_code=options.trust_remote_code,
        context_length=options.context_length,
    )  # fmt: skip
    shape = read_shape(source)
    weights = served_weights(source, shape, options.weights)
    schemes = planned_sizes(options, shape, calibration_options(search.measurement, shape).quant, weights)
    rows = schemes.rows(options.budgets if options.budget else schemes.possible(options.budgets))
    advice = _advice(schemes, rows, options)
    cost = None
    if advice.budgets:
        searched = options.search_options(*advice.budgets)
        gpu = None if options.gpu is None else find_gpu(options.gpu)
        cost = search_cost(searched, source, shape, weights_bytes=weights.stored_bytes, gpu=gpu)
    return CapacityPlan(options, shape, weights, schemes.server, rows, advice, cost)


def planned_sizes(
    options: PlanOptions, shape: ModelShape, quant: QuantizationOptions, weights: ServedWeights
) -> SchemeSizes:
    """The sizes of all schemes on the GPUs of a plan; `ServingError` where the weights do not fit."""
    gpu = None if options.gpu is None else find_gpu(options.gpu)
    memory_mib = gpu.memory_mib if options.memory is None and gpu else (options.memory or 0) // MIB
    server = ServerMemory(
        memory_mib=memory_mib,
        weights_bytes=weights.served_bytes,
        context_length=shape.context_length,
        tp_size=options.tp_size,
        pp_size=options.pp_size,
        max_running_requests=options.concurrency,
    )
    sizes = SchemeSizes(shape, quant, server)
    if server.pool_bytes <= 0:
        raise ServingError(_no_room(sizes, server, options))
    return sizes


def _advice(sizes: SchemeSizes, rows: Sequence[SchemeCapacity], options: PlanOptions) -> Advice:
    wanted = options.concurrency or 1
    fitting = {row.name for row in rows if row.requests >= wanted}
    budgets = tuple(row.name for row in rows if row.kind == "budget" and row.name in fitting)
    exact: Literal["bf16", "fp8"] | None = REFERENCE if REFERENCE in fitting else FP8 if FP8 in fitting else None
    if exact is not None:
        # Nobody said how many requests there are: more of them may be wanted.
        return Advice(exact, () if options.concurrency else budgets)
    if budgets and not options.concurrency:
        return Advice("search", budgets)
    sizes = sizes.serving(max_running_requests=wanted)
    largest = sizes.largest_budget()
    if largest is None:
        return Advice("none", tp_size=_sufficient_tp(sizes, wanted))
    budget, bits = largest
    return Advice("search", (budget.text,), math.floor(100 * bits) / 100)


def _sufficient_tp(sizes: SchemeSizes, wanted: int) -> int | None:
    """The least tensor-parallel ranks, more than these, on which 2 bits hold so many requests."""
    for tp_size in _possible_ranks(sizes):
        other = sizes.serving(tp_size=tp_size)
        if other.server.pool_bytes > 0 and other.smallest().requests >= wanted:
            return tp_size
    return None


def _possible_ranks(sizes: SchemeSizes) -> list[int]:
    heads, possible = sizes.shape.geometry.num_attention_heads, []
    for tp_size in range(sizes.server.tp_size + 1, heads + 1):
        try:
            sizes.shape.geometry.kv_heads_of_rank(0, tp_size)
            state_cost(sizes.shape, tp_size=tp_size)
        except GeometryError:
            continue
        possible += [tp_size] if heads % tp_size == 0 else []
    return possible


def _no_room(sizes: SchemeSizes, server: ServerMemory, options: PlanOptions) -> str:
    fitting = (tp_size for tp_size in _possible_ranks(sizes) if sizes.serving(tp_size=tp_size).server.pool_bytes > 0)
    tp_size = next(fitting, None)
    weights, left = server.rank_weights_bytes, max(server.pool_bytes + server.rank_weights_bytes, 0)
    larger = f"take a GPU with more memory{', or more --pp-size' * (left > 0)}"
    more = f"take --tp-size {tp_size}" if tp_size else larger
    memory = options.gpu if options.memory is None else f"a GPU of {size_text(server.memory_mib * MIB)}"
    return (
        f"{options.model} does not fit: each rank's weights take {size_text(weights)}, and SGLang leaves"
        f" {size_text(left)} of {memory} to weights and cache; {more}"
    )
