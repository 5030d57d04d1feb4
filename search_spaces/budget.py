"""Budgets as a user writes them, and what they mean for a model in integers. Knows nothing of scores."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Literal

from kvtuner.errors import BudgetError
from kvtuner.precision import (
    NATIVE_BITS,
    NO_WINDOW,
    WHOLE_HEADS,
    ExactWindow,
    PrecisionPair,
    RowShape,
    ScaleLayout,
    copy_bytes,
)
from kvtuner.search_spaces.amounts import BYTES, NUMBER, TOKENS, bytes_of_unit, count_of_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.geometry import ModelGeometry
    from kvtuner.layer_geometry import CacheGeometry

BudgetKind = Literal["mean_bits", "effective_bits", "percent", "bytes_per_token", "memory"]

FORMS: Final = "4bit, 4.25bpe, 35%, 18KiB/token or 40GiB@32x64k"
SMALLEST_PAIR: Final = PrecisionPair(2, 2)
NATIVE_PAIR: Final = PrecisionPair(16, 16)

_PATTERNS: Final[dict[BudgetKind, re.Pattern[str]]] = {
    "mean_bits": re.compile(rf"{NUMBER} ?BITS?", re.ASCII),
    "effective_bits": re.compile(rf"{NUMBER} ?BPE", re.ASCII),
    "percent": re.compile(rf"{NUMBER} ?%", re.ASCII),
    "bytes_per_token": re.compile(rf"{BYTES}/TOKEN", re.ASCII),
    "memory": re.compile(rf"{BYTES}@(\d{{1,9}})X{TOKENS}", re.ASCII),
}


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on the KV cache, exact, in the unit that it was written in.

    Attributes:
        kind: The quantity that is limited.
        amount: The number of units.
        unit: The unit as it is written after the amount: ``bit``, ``KiB/token``, ``GiB@32x64k``.
        unit_bytes: bytes of the unit for one token; 1 for kinds that do not count bytes.
        num_requests: The requests that memory is for; None for other kinds.
        request_tokens: The tokens of each of them; None for other kinds.
    """

    kind: BudgetKind
    amount: Fraction
    unit: str
    unit_bytes: Fraction = Fraction(1)
    num_requests: int | None = None
    request_tokens: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read ``4bit`` (payload), ``4.25bpe`` (stored), ``35%`` of bf16, ``18KiB/token``, ``40GiB@32x64k``.

        Bytes are those of one GPU; ``40GiB@32x64k`` is 32 requests of 64 * 1024 tokens on each.

        Raises:
            BudgetError: Any other text, or nothing left to store.
        """
        for kind, pattern in _PATTERNS.items():
            if match := pattern.fullmatch(text.strip().upper()):
                number, *rest = match.groups()
                requests = int(rest[1]) if kind == "memory" else None
                context = count_of_tokens(rest[2], rest[3]) if kind == "memory" else None
                tokens = 1 if requests is None or context is None else requests * context
                if Fraction(number) == 0 or tokens == 0:
                    raise BudgetError(f"a budget must be more than nothing, but is {text!r}; give {FORMS}")
                bytes_each = Fraction(bytes_of_unit(rest[0]) if rest else 1, tokens)
                return cls(kind, Fraction(number), _unit_text(kind, rest), bytes_each, requests, context)
        raise BudgetError(f"a budget is written {FORMS}, not {text!r}")

    @property
    def text(self) -> str:
        """The budget as one writes it, numbers without trailing zeros."""
        return f"{_decimal(self.amount)}{self.unit}"

    @property
    def name(self) -> str:
        """The text as part of a file name: ``4bit``, ``35pct``, ``18KiB-per-token``, ``40GiB-32x64k``."""
        return self.text.replace("%", "pct").replace("/token", "-per-token").replace("@", "-")

    def constraint(
        self,
        geometry: ModelGeometry,
        k_layout: ScaleLayout = WHOLE_HEADS,
        v_layout: ScaleLayout = WHOLE_HEADS,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        window: ExactWindow = NO_WINDOW,
        others: CacheGeometry | None = None,
    ) -> Constraint:
        """The budget as a constraint on a model on tp_size x pp_size ranks; every pipeline stage keeps it.

        Memory for requests also holds the windows and the keys of indexes of `others`, all layers of the model.

        Raises:
            BudgetError: Below the smallest configuration; says the smallest budget possible.
            GeometryError: Ranks that the model cannot be split over.
            PrecisionError: Group sizes that rows of 2 bits cannot be packed with.
        """
        shape = geometry.row_shape(k_layout, v_layout, tp_size=tp_size)
        stages = tuple(geometry.layers_of_stage(rank, pp_size) for rank in range(pp_size))
        beside = 0
        if others is not None and self.request_tokens is not None:
            beside = others.window_bytes(self.request_tokens, tp_size) + self.request_tokens * others.index_bytes()
        constraint = Constraint(self, shape, stages, window, beside)
        if not constraint.is_met([SMALLEST_PAIR] * geometry.num_layers):
            raise BudgetError(
                f"a budget must hold every layer at {SMALLEST_PAIR}, but {self.text} does not;"
                f" the smallest possible is {constraint.smallest()}"
            )
        return constraint


@dataclass(frozen=True, slots=True)
class Constraint:
    """A budget as exact integers: in each pipeline stage, the costs of its layers' pairs sum to at most its cap.

    The unit is stored bytes of one token on one rank, whose rows have `shape`; for mean_bits, payload bits of one token
    per KV head. Memory for requests of a known length holds the copies of their exact window too, and the bytes of
    layers with windows and of indexes; other budgets are of rows alone.

    Attributes:
        bytes_beside: The bytes of one request's layers with windows, and of its keys of indexes, in memory for
            requests.
    """

    budget: Budget
    shape: RowShape
    stages: tuple[range, ...]
    window: ExactWindow = NO_WINDOW
    bytes_beside: int = 0

    @property
    def num_layers(self) -> int:
        """Layers of all stages."""
        return self.stages[-1].stop

    def cost(self, pair: PrecisionPair) -> int:
        """Cost of one layer at `pair`."""
        if self.budget.kind == "mean_bits":
            return self.shape.payload_bits(pair)
        return self.shape.pair_bytes(pair) - self.uncopied(pair)

    def uncopied(self, pair: PrecisionPair) -> int:
        """The whole bytes that `cap` takes off for copies of a layer's keys and values, where `pair` needs none."""
        native = self.shape.pair_bytes(NATIVE_PAIR)
        if self.budget.request_tokens is None or pair != NATIVE_PAIR:
            return 0
        return min(native, self.window.num_tokens * native // self.budget.request_tokens)

    def cap(self, stage: int) -> int:
        """The cost that the layers of one stage may have together."""
        # Costs are integers, so that rounding down refuses no configuration.
        return math.floor(self.budget.amount * self._cost_of_unit(stage) - self._window_cost(stage))

    def _cost_of_unit(self, stage: int) -> Fraction:
        """Cost that one unit of the budget allows a stage: one bit per element, one percent, one KiB."""
        # Elements of one token in the stage's layers, per KV head.
        channels = len(self.stages[stage]) * self.shape.channels
        match self.budget.kind:
            case "mean_bits":
                return Fraction(channels)
            case "effective_bits":
                return Fraction(channels * self.shape.num_kv_heads, 8)
            case "percent":
                return Fraction(len(self.stages[stage]) * self.shape.pair_bytes(NATIVE_PAIR), 100)
            case "bytes_per_token" | "memory":
                return self.budget.unit_bytes

    def _window_cost(self, stage: int) -> Fraction:
        """Bytes of a stage's exact copies, of layers all packed, and of windows, spread over a request's tokens."""
        if self.budget.request_tokens is None:
            return Fraction(0)
        layer_bytes = self.window.num_tokens * copy_bytes(SMALLEST_PAIR, self.shape.pair_bytes(NATIVE_PAIR))
        return Fraction(len(self.stages[stage]) * layer_bytes + self.bytes_beside, self.budget.request_tokens)

    def most_bytes(self, stage: int, widths: Sequence[int]) -> int:
        """The most stored bytes of one token that a stage's layers take inside the budget, at packed `widths` or 16.

        A budget of payload bits allows scale words and padding besides. Of several mixes with other scale words this
        counts the most that a layer has, and never more than 16 bits take.
        """
        layers, native = len(self.stages[stage]), self.shape.pair_bytes(NATIVE_PAIR)
        most = self.cap(stage)
        if self.budget.kind == "mean_bits":
            heads = self.shape.num_kv_heads
            pairs = [PrecisionPair(k, v) for k in (*widths, NATIVE_BITS) for v in (*widths, NATIVE_BITS)]
            beside = max(Fraction(self.shape.pair_bytes(p)) - Fraction(heads * self.cost(p), 8) for p in pairs)
            most = math.floor(Fraction(most * heads, 8) + layers * beside)
        return min(most, layers * native)

    def stage_costs(self, pairs: Sequence[PrecisionPair]) -> list[int]:
        """The cost of a configuration in each stage."""
        assert len(pairs) == self.num_layers
        return [sum(self.cost(pairs[layer]) for layer in stage) for stage in self.stages]

    def is_met(self, pairs: Sequence[PrecisionPair]) -> bool:
        """Whether every stage keeps the budget."""
        return all(cost <= self.cap(stage) for stage, cost in enumerate(self.stage_costs(pairs)))

    def violation(self, pairs: Sequence[PrecisionPair]) -> float:
        """The worst stage's excess over its cap, as a share of the cap; at most 0 exactly where the budget is kept."""
        caps = [self.cap(stage) for stage in range(len(self.stages))]
        return max((cost - cap) / max(cap, 1) for cost, cap in zip(self.stage_costs(pairs), caps, strict=True))

    def smallest(self, pairs: Sequence[PrecisionPair] | None = None) -> str:
        """The smallest budget, in the same unit, that holds `pairs`; by default 2 bits everywhere."""
        costs = self.stage_costs([SMALLEST_PAIR] * self.num_layers if pairs is None else pairs)
        needed = max((cost + self._window_cost(stage)) / self._cost_of_unit(stage) for stage, cost in enumerate(costs))
        return f"{_decimal(_rounded_up(needed))}{self.budget.unit}"


def _unit_text(kind: BudgetKind, rest: Sequence[str]) -> str:
    if kind in ("bytes_per_token", "memory"):
        unit = rest[0].replace("I", "i")
        return f"{unit}/token" if kind == "bytes_per_token" else f"{unit}@{rest[1]}x{rest[2]}{rest[3].lower()}"
    return {"mean_bits": "bit", "effective_bits": "bpe", "percent": "%"}[kind]


def _decimal(value: Fraction) -> str:
    """A fraction whose decimals end, without trailing zeros or exponent."""
    text = f"{Decimal(value.numerator) / Decimal(value.denominator):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _rounded_up(value: Fraction) -> Fraction:
    """Up to at least three significant digits and two decimals."""
    decimals = 2  # rounded up: the budget that a message names must be enough
    while value * 10**decimals < 100:
        decimals += 1
    return Fraction(math.ceil(value * 10**decimals), 10**decimals)
