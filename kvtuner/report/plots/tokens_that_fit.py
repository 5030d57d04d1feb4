"""Tokens and requests that fit beside those of bf16 and fp8. Measures nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import BudgetError
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME
from kvtuner.exported_configs.scheme_names import FP8, REFERENCE
from kvtuner.precision import GIB, tokens_per_gib
from kvtuner.report.formatting import WINDOW_CONTEXTS, context_name, count
from kvtuner.report.plots.drawing import CHARACTER, Drawing
from kvtuner.report.search_data import rank_text
from kvtuner.report.table import Table
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
class SchemeFit:
    """The tokens of a scheme that fit, and its requests of every context; None where their bytes are not known."""

    name: str
    bytes_per_token: int
    tokens: int
    requests: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class FittedMemory:
    """What fits some memory by each scheme.

    Attributes:
        heading: The unit of the bars, such as ``tokens per GiB``.
        contexts: The tokens of a request, ascending.
        schemes: The schemes bf16, fp8 where it is known, and the profile.
        caption: The memory, after ``What fits``; without a full stop.
    """

    heading: str
    contexts: tuple[int, ...]
    schemes: tuple[SchemeFit, ...]
    caption: str

    @classmethod
    def of(cls, data: ReportData) -> FittedMemory:
        """What fits the memory of `FittingRequests`, weights aside."""
        fitting, budget = FittingRequests.of(data), data.budget
        memory_bytes = round(fitting.memory_gib * GIB)
        schemes = tuple(
            SchemeFit(
                scheme.name,
                scheme.bytes_per_token,
                tokens_per_gib(scheme.bytes_per_token + scheme.index_bytes),
                tuple(scheme.requests(memory_bytes, context) for context in fitting.contexts),
            )
            for scheme in stored_schemes(data)
        )
        rank = rank_text(budget.tp_size, budget.pp_size)
        copies = ", with their exact copies" if budget.window_bytes else ""
        index = f", with {count(budget.index_bytes)} bytes of keys of indexes a token" if budget.index_bytes else ""
        caption = (
            f"{rank}: tokens in 1 GiB, and requests in {fitting.memory_gib:g} GiB{copies}{index}. For a GPU's memory"
            " beside the weights: kvtuner report --gpu NAME"
        )
        return cls("tokens per GiB", fitting.contexts, schemes, caption)

    def table(self) -> Table:
        """The same figures as a table."""
        headers = ("", "bytes/token", self.heading, *(f"requests of {context_name(n)}" for n in self.contexts))
        rows = [
            (row.name, count(row.bytes_per_token), count(row.tokens), *map(count, row.requests)) for row in self.schemes
        ]
        return Table(headers, rows)

    def to_json(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        return {"contexts": list(self.contexts), "schemes": [asdict(row) for row in self.schemes]}


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """The bytes of one token, and those that a token and each request take beside; None where they are not known.

    Attributes:
        index_bytes: The bytes of a token's keys of indexes.
        bytes_per_request: The bytes of a request's exact copies.
    """

    name: str
    bytes_per_token: int
    index_bytes: int
    bytes_per_request: int | None = 0

    def requests(self, memory_bytes: int, context: int) -> int | None:
        """The requests of that many tokens that fit into that many bytes."""
        if self.bytes_per_request is None:
            return None
        return memory_bytes // ((self.bytes_per_token + self.index_bytes) * context + self.bytes_per_request)


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
        wanted = _LEAST_REQUESTS * contexts[-1] * (data.budget.bf16_bytes_per_token + data.budget.index_bytes)
        return cls(1 << (-(-wanted // GIB) - 1).bit_length(), contexts)


def requested_context(data: ReportData) -> int | None:
    """The tokens of a request by the budget, or else the served context; None where neither is known."""
    asked = _asked_requests(data.budget.asked)
    return data.budget.context_length if asked is None else asked.contexts[-1]


def stored_schemes(data: ReportData) -> list[StoredScheme]:
    """The schemes bf16, fp8 where it was measured, and the profile."""
    budget = data.budget
    index, copies = budget.index_bytes, budget.window_bytes if budget.window.num_tokens else 0
    fp8 = [row for quality in data.quality[:1] for row in quality.baselines if row.name == FP8]
    return [
        StoredScheme(REFERENCE, budget.bf16_bytes_per_token, index),
        *(StoredScheme(FP8, row.bytes_per_token, index) for row in fp8[:1]),
        StoredScheme(PROFILE_SCHEME, budget.bytes_per_token, index, copies),
    ]


def tokens_that_fit(fit: FittedMemory, width: float) -> Drawing:
    """Bars of the tokens that fit, and the requests of every context beside them."""
    most = max(1, *(scheme.tokens for scheme in fit.schemes))
    start, bars_end = 8 * CHARACTER, width - _COUNT_COLUMN * len(fit.contexts)
    room = bars_end - start - 11 * CHARACTER
    drawing = Drawing(width, _fit_text(fit), _HEADINGS)
    drawing.write(start, 24, fit.heading, "soft")
    ends = [bars_end + _COUNT_COLUMN * (index + 1) for index in range(len(fit.contexts))]
    for context, end in zip(fit.contexts, ends, strict=True):
        drawing.write(end, 8, "requests", "soft", anchor="end")
        drawing.write(end, 24, f"of {context_name(context)}", "soft", anchor="end")
    for scheme in fit.schemes:
        middle, length = drawing.height + _ROW / 2, room * scheme.tokens / most
        look = "winner" if scheme is fit.schemes[-1] else "other"
        title = f"{scheme.name}: {count(scheme.bytes_per_token)} bytes per token"
        drawing.write(0, middle, scheme.name, "strong" if look == "winner" else "", title=title)
        drawing.rect(start, middle - 8, max(length, 1.0), 16, f"bar {look}", title)
        drawing.write(start + length + 6, middle, count(scheme.tokens), title=title)
        for requests, end in zip(scheme.requests, ends, strict=True):
            drawing.write(end, middle, count(requests), "strong" if look == "winner" else "", anchor="end", title=title)
        drawing.height += _ROW
    return drawing


def _fit_text(fit: FittedMemory) -> str:
    texts = [f"{fit.heading}: " + ", ".join(f"{scheme.name} {count(scheme.tokens)}" for scheme in fit.schemes)]
    for place, context in enumerate(fit.contexts):
        requests = ", ".join(f"{scheme.name} {count(scheme.requests[place])}" for scheme in fit.schemes)
        texts.append(f"requests of {context_name(context)}: {requests}")
    return f"What fits{fit.caption}. {'; '.join(texts)}"


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
