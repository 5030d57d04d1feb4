"""What the report says about its pictures and tables: how to read them, and what they show in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtuner.report.formatting import interval, number
from kvtuner.report.plots.grid_plots import SCORE_TITLES

if TYPE_CHECKING:
    from kvtuner.report.search_data import ReportData

BITS: Final = "mean_bits counts the payload of an element, effective_bits all that is stored: scales and padding too."
BITS_CHOSEN: Final = (
    "Each column is a layer, keys above values; the number is the width in bits, and darker is wider."
    " 16 keeps the served dtype."
)
FRONT: Final = (
    "Lower left is better. The line is the exact front of the predictions: for every size, the least sum"
    " of the layers' own scores. Dots are assembled configurations, measured on the select split, or"
    " estimated there if they were clearly worse on its first sequences; squares and the star are measured"
    " on the report split, with their intervals. A name stands for both squares of its width. A dotted line"
    " marked 0 holds what has no measurable KL."
)
ADDITIVITY: Final = (
    "The prediction adds up layers measured one at a time. Above 1 the layers make each other's errors"
    " worse, below 1 they hide them; far from 1, the measured refinement matters."
)
TRANSFORM_GAINS: Final = "The score without a transform over the score with the best, geometric mean over layers."
RANK_CORRELATIONS: Final = "Spearman's rho over the candidates that have both; 1 is the same order."
HISTORY: Final = (
    "Every trial of the refinement, on the select split. Diamonds were put in from outside (the exact"
    " solution, uniforms, their neighbours); dots are the sampler's own; crosses broke the budget and cost"
    " no forward pass. What was clearly worse on the first sequences was not run on all of them: its value is an"
    " estimate. The line is the best so far."
)
NO_LATENCY: Final = "Memory is computed from the packed format; latency was not measured here."


def verdict(data: ReportData) -> str:
    """The winner's KL beside the best uniforms that the budget allows."""
    quality = data.quality[0] if data.quality else None
    if quality is None or quality.winner.kl is None:
        return "The quality of this configuration was not measured."
    text = (
        f"KL against the unquantized cache: {interval(quality.winner.kl)} nats per token"
        f" ({quality.offsets} position offsets)."
    )
    for transforms, words in ((False, "without transforms"), (True, "with the best transforms")):
        rival = quality.best_baseline(transforms=transforms)
        if rival is not None and rival.kl is not None:
            text += f" Best uniform inside the budget {words}: {rival.name} with {interval(rival.kl)}."
    return text


def quality(data: ReportData) -> str:
    """How to read the quality tables."""
    return (
        "KL is the divergence of the next-token distribution from the unquantized model's, in nats per"
        f" token: 0 is identical, less is better. Brackets hold {level(data)} bootstrap intervals over"
        " whole sequences of the report split, which took no part in the search. The difference is a row's"
        " KL minus the winner's on the same tokens: where its interval lies above zero, the winner is"
        " better. p99 is the KL that one token in a hundred exceeds; top-1 is how often the most likely"
        f" token is the same. Read plan: {data.read_plan}."
    )


def sensitivity(data: ReportData) -> str:
    """How to read the heatmap."""
    return (
        "What it costs to store the keys or the values of one layer alone at that width, with the best"
        f" transform found for it: {SCORE_TITLES[data.score]}. Darker is worse, on one colour scale for all"
        " widths. Hatched cells were not measured."
    )


def uniform_kl(data: ReportData) -> str:
    """How to read the K x V table."""
    how = "with each layer's best transforms" if data.uniform_kl_transforms else "without transforms"
    return (
        "KL on the select split when every layer stores keys at the row's width and values at the"
        f" column's, {how}. If the colour changes more from row to row than from column to column, keys"
        " need the bits more."
    )


def level(data: ReportData) -> str:
    """Confidence of the intervals: ``95%``."""
    return f"{100 * data.interval_level:g}%"


def describe(data: ReportData) -> dict[str, str]:
    """Each picture in words, for those who do not see it."""
    return {
        "chosen-bits": "Bits of keys and values: " + _chosen_words(data),
        "pareto-front": "KL against effective bits: " + _front_words(data),
        "sensitivity": f"{SCORE_TITLES[data.score]} by layer, at 2, 4 and 8 bits. {_worst_words(data)}",
        "uniform-kl": "KL of uniform pairs: "
        + ", ".join(f"K{cell.k_bits}V{cell.v_bits} {number(cell.kl)}" for cell in data.uniform_kl),
        "history": _history_words(data),
    }


def _chosen_words(data: ReportData) -> str:
    return ", ".join(f"layer {row.layer} K{row.k_bits}V{row.v_bits}" for row in data.layers)


def _front_words(data: ReportData) -> str:
    rows = [row for quality in data.quality[:1] for row in (quality.winner, *quality.baselines)]
    return "; ".join(
        f"{row.label} at {row.effective_bits:.2f} bits has {number(row.kl.mean if row.kl else None)}" for row in rows
    )


def _worst_words(data: ReportData) -> str:
    known = [
        (value, row) for row in data.sensitivity if row.bits == 2 and (value := row.best.get(data.score)) is not None
    ]
    worst = sorted(known, key=lambda item: -item[0])[:3]
    return "Worst at 2 bits: " + ", ".join(f"layer {row.layer} {row.side.upper()} {number(v)}" for v, row in worst)


def _history_words(data: ReportData) -> str:
    values = [trial.value for trial in data.trials if trial.feasible and trial.value is not None]
    best = number(min(values, default=None))
    return f"Measured KL by trial: {len(data.trials)} trials, {len(values)} measured, best {best}"
