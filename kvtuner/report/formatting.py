"""Numbers and names as every report writes them. Knows nothing of what they mean."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fractions import Fraction

    from kvtuner.evaluation.statistics import Interval
    from kvtuner.exported_configs.profile.evaluation_record import CellResult, PairedDifference
    from kvtuner.exported_configs.profile.records import IntervalRecord, ModelIdentity
    from kvtuner.precision import ExactWindow

NOT_MEASURED: Final = "-"
WINDOW_CONTEXTS: Final = (4096, 32768)
"""The lengths of context, in tokens, at which stored bits are shown with an exact window."""


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits, with an exponent below 0.001: ``0.0490``, ``4.10e-5``, ``0``."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    text = f"{value:#.{digits}g}"
    return f"{value:.0f}" if "e" in text else text.removesuffix(".")


def is_positive(value: float | None) -> bool:
    """Whether a logarithmic scale can show it."""
    return value is not None and math.isfinite(value) and value > 0


def interval(value: Interval | IntervalRecord | CellResult | PairedDifference | None) -> str:
    """``mean [low, high]``."""
    return NOT_MEASURED if value is None else f"{number(value.mean)} [{number(value.low)}, {number(value.high)}]"


def fixed(value: float | Fraction | None, decimals: int = 2) -> str:
    """A fixed number of decimals; with an exponent from ten million on, as a broken model's perplexity may need."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURED
    figure = float(value)
    return f"{figure:,.{decimals}f}" if abs(figure) < 1e7 else f"{figure:.2e}"


def count(value: int | None) -> str:
    """A count with commas."""
    return NOT_MEASURED if value is None else f"{value:,}"


def context_name(num_tokens: int) -> str:
    """A number of tokens, in units of 1,024 where it is whole ones: ``32k``."""
    return f"{num_tokens // 1024}k" if num_tokens % 1024 == 0 else count(num_tokens)


def window_facts(window: ExactWindow, effective_bits: float, request_bytes: int | None) -> list[tuple[str, str]]:
    """The cost of an exact window: bytes of a request, and stored bits of an element at two lengths of context.

    Without a window there is nothing to say.
    """
    if not window.num_tokens:
        return []
    bits = [f"{effective_bits + float(window.bits_at(n)):.3f} at {context_name(n)}" for n in WINDOW_CONTEXTS]
    return [
        ("window", f"{window}: {count(request_bytes)} bytes per request"),
        ("bits with window", f"{', '.join(bits)} tokens of context"),
    ]


def percent(share: float | None) -> str:
    """A share in [0, 1] as a percentage of one decimal."""
    return NOT_MEASURED if share is None or not math.isfinite(share) else f"{100 * share:.1f}%"


def printable(text: str) -> str:
    """Text without control characters: a profile may come from anybody."""
    return "".join(c if c.isprintable() else "?" for c in text)


def ascii_text(text: str) -> str:
    """Printable text in letters that every terminal and every font has."""
    return printable(text.encode("ascii", "replace").decode())


def model_name(model: ModelIdentity) -> str:
    """The id of a model, with its revision where there is one."""
    return f"{model.id}@{model.revision}" if model.revision else model.id
