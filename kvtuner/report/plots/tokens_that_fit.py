"""Tokens and requests that fit beside those of bf16 and fp8. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.errors import BudgetError
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME
from kvtuner.exported_configs.scheme_names import FP8, REFERENCE
from kvtuner.precision import GIB, tokens_per_gib
from kvtuner.report.formatting import WINDOW_CONTEXTS, context_name, count
from kvtuner.report.plots.drawing import CHARACTER, Drawing
from kvtuner.search_spaces.budget import Budget

if TYPE_CHECKING:
    from kvtuner.report.search_data import ReportData

SHORT_CONTEXT: Final = 4096
"""The tokens of the shorter requests that are counted, where the budget does not name a length."""
_LEAST_REQUESTS: Final = 4
"""The requests of the longest context that bf16 shall hold, so that whole numbers of requests can be compared."""
_ROW: Final = 24.0
_HEADINGS: Final = 34.0
_COUNT_COLUMN: Final = 66.0


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """The bytes of one token, and those that each request takes beside its tokens; None where they are not known."""

    name: str
    bytes_per_token: int
    bytes_per_request: int | None = 0

    def requests(self, memory_bytes: int, context: int) -> int | None:
        """The requests of that many tokens that fit into that many bytes."""
        if self.bytes_per_request is None:
            return None
        return memory_bytes // (self.bytes_per_token * context + self.bytes_per_request)


@dataclass(frozen=True, slots=True)
class FittingRequests:
    """The memory and the lengths of request that requests are counted for.

    Attributes:
        memory_gib: The memory of one GPU that holds the cache.
        contexts: The tokens of a request, ascending.
    """

    memory_gib: float
    contexts: tuple[int, ...]

    @classmethod
    def of(cls, data: ReportData) -> FittingRequests:
        """The budget's memory and context, where it names them; else 4k tokens and the served context.

        The memory then is the least power of two that holds four requests of bf16.
        """
        if (asked := _asked_requests(data.budget.asked)) is not None:
            return asked
        served = data.budget.context_length
        contexts = WINDOW_CONTEXTS if served is None else tuple(sorted({min(SHORT_CONTEXT, served), served}))
        wanted = _LEAST_REQUESTS * contexts[-1] * data.budget.bf16_bytes_per_token
        return cls(1 << (-(-wanted // GIB) - 1).bit_length(), contexts)


def stored_schemes(data: ReportData) -> list[StoredScheme]:
    """The schemes bf16, fp8 where it was measured, and the profile."""
    budget = data.budget
    copies = budget.window_bytes if budget.window.num_tokens else 0
    fp8 = [row for quality in data.quality[:1] for row in quality.baselines if row.name == FP8]
    return [
        StoredScheme(REFERENCE, budget.bf16_bytes_per_token),
        *(StoredScheme(FP8, row.bytes_per_token) for row in fp8[:1]),
        StoredScheme(PROFILE_SCHEME, budget.bytes_per_token, copies),
    ]


def tokens_that_fit(data: ReportData, width: float) -> Drawing:
    """Bars of tokens per GiB, and requests that fit into the memory of `FittingRequests`."""
    schemes, fitting = stored_schemes(data), FittingRequests.of(data)
    most = max(tokens_per_gib(scheme.bytes_per_token) for scheme in schemes)
    start, bars_end = 8 * CHARACTER, width - _COUNT_COLUMN * len(fitting.contexts)
    room = bars_end - start - 11 * CHARACTER
    drawing = Drawing(width, _fit_text(schemes, fitting), _HEADINGS)
    drawing.write(start, 24, "tokens per GiB", "soft")
    ends = [bars_end + _COUNT_COLUMN * (index + 1) for index in range(len(fitting.contexts))]
    for context, end in zip(fitting.contexts, ends, strict=True):
        drawing.write(end, 8, "requests", "soft", anchor="end")
        drawing.write(end, 24, f"of {context_name(context)}", "soft", anchor="end")
    for scheme in schemes:
        middle, tokens = drawing.height + _ROW / 2, tokens_per_gib(scheme.bytes_per_token)
        look = "winner" if scheme is schemes[-1] else "other"
        title = f"{scheme.name}: {count(scheme.bytes_per_token)} bytes per token"
        drawing.write(0, middle, scheme.name, "strong" if look == "winner" else "", title=title)
        drawing.rect(start, middle - 8, max(room * tokens / most, 1.0), 16, f"bar {look}", title)
        drawing.write(start + room * tokens / most + 6, middle, count(tokens), title=title)
        for context, end in zip(fitting.contexts, ends, strict=True):
            fit = scheme.requests(round(fitting.memory_gib * GIB), context)
            drawing.write(end, middle, count(fit), "strong" if look == "winner" else "", anchor="end", title=title)
        drawing.height += _ROW
    return drawing


def _fit_text(schemes: list[StoredScheme], fitting: FittingRequests) -> str:
    texts = (f"{scheme.name} {count(tokens_per_gib(scheme.bytes_per_token))}" for scheme in schemes)
    requests = [
        f"{scheme.name} {count(scheme.requests(round(fitting.memory_gib * GIB), context))} of {context_name(context)}"
        for context in fitting.contexts
        for scheme in schemes
    ]
    return f"Tokens per GiB: {', '.join(texts)}. Requests in {fitting.memory_gib:g} GiB: {', '.join(requests)}"


def _asked_requests(asked: str) -> FittingRequests | None:
    """The memory and context of a budget such as ``40GiB@32x64k``; None for any other."""
    try:
        budget = Budget.parse(asked)
    except BudgetError:  # layers were given in place of a budget
        return None
    if budget.num_requests is None or budget.request_tokens is None:
        return None
    memory = budget.amount * budget.unit_bytes * budget.num_requests * budget.request_tokens
    return FittingRequests(float(memory / GIB), (budget.request_tokens,))
