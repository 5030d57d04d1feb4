"""The tokens and requests that fit on a server's ranks by each cache scheme and budget. Knows nothing of advice."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from kvtuner.errors import BudgetError, ServingError
from kvtuner.evaluation.validation import uniform_pairs
from kvtuner.exported_configs.scheme_names import FP8, REFERENCE
from kvtuner.pipeline.planning.server_memory import CacheCost
from kvtuner.pipeline.planning.state_cost import state_cost
from kvtuner.pipeline.planning.window_cost import fp8_bytes_of_layer, window_bytes_per_token
from kvtuner.pipeline.stages.search_run import serving_ranks
from kvtuner.precision import GIB, NATIVE_BITS, PrecisionPair, bytes_per_token, copy_bytes
from kvtuner.runtime_loader.workspaces import AttentionShape, attention_bytes
from kvtuner.search_spaces.budget import SMALLEST_PAIR, Budget
from kvtuner.supported_models import num_selected_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.pipeline.planning.server_memory import ServerMemory
    from kvtuner.search_spaces.budget import Constraint

SchemeKind = Literal["bf16", "fp8", "uniform", "budget", "profile"]
_NATIVE: Final = PrecisionPair(NATIVE_BITS, NATIVE_BITS)


@dataclass(frozen=True, slots=True)
class SchemeCapacity:
    """The tokens, and requests of the whole context, that fit by one cache scheme or inside one budget.

    Bytes and bits are those of full layers on the fullest rank; a budget's are the most that it allows. Copies are
    those of an exact window, of one request; the workspace is what attention over packed rows takes beside the cache.
    Window and index bytes are what a token takes besides, where layers have a window or an index.
    """

    name: str
    kind: SchemeKind
    effective_bits: float
    bytes_per_token: int
    window_bytes_per_token: float
    index_bytes_per_token: int
    copies_bytes_per_request: int
    workspace_bytes: int
    tokens: int
    requests: int

    @property
    def title(self) -> str:
        """The name, of a budget as the most that it allows."""
        return f"<= {self.name}" if self.kind == "budget" else self.name


class SchemeSizes:
    """The bytes of every scheme on a server's ranks, and what fits by them."""

    def __init__(self, shape: ModelShape, quant: QuantizationOptions, server: ServerMemory) -> None:
        if shape.geometry.is_latent and server.pp_size > 1:
            raise ServingError("SGLang serves packed latents (MLA) in no pipeline stages yet: plan with --pp-size 1")
        states = state_cost(shape, tp_size=server.tp_size, pp_size=server.pp_size)
        self.shape, self.quant, self.server = shape, quant, replace(server, states=states)
        self.ranks = serving_ranks(quant, shape, tp_size=server.tp_size, pp_size=server.pp_size)
        rows = self.ranks.shape
        self._copies_of_layer = self._copies([SMALLEST_PAIR])
        self.channels = rows.num_kv_heads * rows.channels
        self.window_bytes = window_bytes_per_token(shape, server.tp_size)
        self.index_bytes = shape.cache.index_bytes()
        attention = AttentionShape.of(
            shape.geometry, tp_size=server.tp_size, chunk_tokens=server.chunk_tokens,
            graph_requests=server.graph_requests, context_length=server.context_length,
            window_tokens=quant.window.num_tokens, index_topk=num_selected_tokens(shape.config) or 0,
        )  # fmt: skip
        self.workspace_bytes = attention_bytes(attention)

    def serving(self, **changes: Any) -> SchemeSizes:
        """The same by another server."""
        return SchemeSizes(self.shape, self.quant, replace(self.server, **changes))

    def rows(self, budgets: Sequence[str]) -> tuple[SchemeCapacity, ...]:
        """The capacity of every scheme, and of every budget."""
        pairs = uniform_pairs(self.quant.widths, self.shape.geometry)
        uniforms = (self._row(str(pair), "uniform", self.ranks.shape.pair_bytes(pair)) for pair in pairs)
        return (*self.sglang_rows(), *uniforms, *(self.budget_row(Budget.parse(text)) for text in budgets))

    def possible(self, budgets: Sequence[str]) -> list[str]:
        """Those of some budgets that hold every layer at 2 bits; beside latents rotary channels keep 16."""
        return [text for text in budgets if self._holds_all(Budget.parse(text))]

    def _holds_all(self, budget: Budget) -> bool:
        try:
            self.constraint(budget)
        except BudgetError:
            return False
        return True

    def sglang_rows(self) -> tuple[SchemeCapacity, SchemeCapacity]:
        """The capacity of bf16 and of fp8, which SGLang has by itself."""
        bf16 = self._row(REFERENCE, REFERENCE, self.ranks.shape.pair_bytes(_NATIVE))
        return bf16, self._row(FP8, FP8, fp8_bytes_of_layer(self.shape, self.ranks.shape))

    def pairs_row(self, name: str, pairs: Sequence[PrecisionPair]) -> SchemeCapacity:
        """The capacity of a profile that has these pairs, one for each layer."""
        stages = [bytes_per_token(pairs[layers.start : layers.stop], self.ranks.shape) for layers in self.ranks.stages]
        copies = [self._copies(pairs[layers.start : layers.stop]) for layers in self.ranks.stages]
        return self._capacity(name, "profile", stages, copies)

    def budget_row(self, budget: Budget) -> SchemeCapacity:
        """The capacity of the most that a budget allows."""
        constraint = self.constraint(budget)
        stages = [constraint.most_bytes(stage, self.quant.widths) for stage in range(len(self.ranks.stages))]
        native = self.ranks.shape.pair_bytes(_NATIVE)
        is_exact = all(
            num_bytes >= len(layers) * native for num_bytes, layers in zip(stages, self.ranks.stages, strict=True)
        )
        return self._capacity(budget.text, "budget", stages, self._stage_copies(has_copies=not is_exact))

    def constraint(self, budget: Budget) -> Constraint:
        """A budget as a constraint on these ranks."""
        quant, server = self.quant, self.server
        return budget.constraint(
            self.shape.geometry, quant.k_layout, quant.v_layout, tp_size=server.tp_size, pp_size=server.pp_size,
            window=quant.window, others=self.shape.cache,
        )  # fmt: skip

    def smallest(self) -> SchemeCapacity:
        """The capacity of 2 bits everywhere, the least that a search may choose."""
        return self._row(str(SMALLEST_PAIR), "uniform", self.ranks.shape.pair_bytes(SMALLEST_PAIR))

    def largest_budget(self) -> tuple[Budget, float] | None:
        """The largest budget with which all requests that the server runs fit, and its stored bits; None without one.

        The server must have been asked to run a number of requests.
        """
        concurrency, context = self.server.max_running_requests, self.server.context_length
        assert concurrency is not None
        # The server has one slot more than requests.
        room = self.server.pool_bytes - self.server.states_bytes - self.workspace_bytes
        room -= max(map(len, self.ranks.stages)) * self._copies_of_layer
        # The budget counts windows alone, of which the server keeps more.
        counted = self.shape.cache.window_bytes(context, self.server.tp_size)
        room -= math.ceil(concurrency * (context * self.window_bytes - counted))
        if room < GIB // 100:
            return None
        hundredths = room * 100 // GIB
        tokens = f"{context // 1024}k" if context % 1024 == 0 else str(context)
        budget = Budget.parse(f"{hundredths // 100}.{hundredths % 100:02}GiB@{concurrency}x{tokens}")
        try:
            constraint = self.constraint(budget)
        except BudgetError:
            return None
        if self.budget_row(budget).requests < concurrency:
            return None  # copies take too much
        stages = enumerate(self.ranks.stages)
        return budget, min(8 * constraint.cap(stage) / (len(layers) * self.channels) for stage, layers in stages)

    def _row(self, name: str, kind: SchemeKind, layer_bytes: int) -> SchemeCapacity:
        stages = [len(layers) * layer_bytes for layers in self.ranks.stages]
        return self._capacity(name, kind, stages, self._stage_copies(has_copies=kind == "uniform"))

    def _copies(self, pairs: Sequence[PrecisionPair]) -> int:
        """The bytes of a request's exact copies in layers of these pairs on one rank."""
        native = self.ranks.shape.pair_bytes(_NATIVE)
        return self.quant.window.num_tokens * sum(copy_bytes(pair, native) for pair in pairs)

    def _stage_copies(self, *, has_copies: bool) -> list[int]:
        """The bytes of a request's exact copies in each pipeline stage, where all layers have some or none has."""
        return [self._copies_of_layer * has_copies * len(layers) for layers in self.ranks.stages]

    def _capacity(self, name: str, kind: SchemeKind, stages: Sequence[int], copies: Sequence[int]) -> SchemeCapacity:
        """The capacity by the bytes of a token, and of a request's copies, in each stage; the fullest limits all."""
        workspace = 0 if kind in (REFERENCE, FP8) else self.workspace_bytes
        windows = self.window_bytes / 2 if kind == FP8 else self.window_bytes
        costs = [
            CacheCost(rank_bytes + windows + self.index_bytes, rank_copies, sum(stages), sum(copies), workspace)
            for rank_bytes, rank_copies in zip(stages, copies, strict=True)
        ]
        tokens = [self.server.tokens(cost) for cost in costs]
        # Of stages that hold as much, the last has the most layers.
        fullest = min(reversed(range(len(costs))), key=tokens.__getitem__)
        cost, layers = costs[fullest], self.ranks.stages[fullest]
        return SchemeCapacity(
            name=name,
            kind=kind,
            effective_bits=8 * stages[fullest] / (len(layers) * self.channels),
            bytes_per_token=stages[fullest],
            window_bytes_per_token=windows,
            index_bytes_per_token=self.index_bytes,
            copies_bytes_per_request=cost.bytes_per_request,
            workspace_bytes=workspace,
            tokens=tokens[fullest],
            requests=self.server.requests(tokens[fullest], cost),
        )
