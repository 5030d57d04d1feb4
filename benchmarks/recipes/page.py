"""The table and the picture of a comparison, made of its JSON alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtuner.report.plots import style
from kvtuner.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Row = Mapping[str, Any]

VERDICTS: Final = {"ours": "ours", "theirs": "THEIRS", "even": "even", "none": "-"}
FAMILIES: Final = {
    "KIVI": ("s", style.GREEN),
    "QuaRot": ("v", style.GREY),
    "SAW-INT4": ("P", style.INK),
    "TurboQuant": ("^", style.PURPLE),
    "KVarN": ("D", style.VERMILION),
    "OSCAR": ("o", style.ORANGE),
    "SGLang": ("X", style.SKY),
    "KVTuner paper": ("h", "#FFFFFF"),
}


def kl_text(kl: Mapping[str, float]) -> str:
    """A mean with its standard error."""
    return f"{kl['mean']:.3g} ± {kl['error']:.2g}"


def markdown(result: Mapping[str, Any]) -> str:
    """The page: every recipe beside ours in as many stored bits, and per-layer bits beside uniforms."""
    lines = [f"# Recipes on {result['model']}", "", *result["notes"], ""]
    for context in result["contexts"]:
        tokens = context["tokens"]
        lines += [f"## {tokens} tokens of context", "", context["note"], ""]
        lines += [*_recipe_table(context["recipes"]).markdown(), ""]
        lines += [*_search_table(context["searches"]).markdown(), ""]
    return "\n".join(lines)


def _recipe_table(rows: Sequence[Row]) -> Table:
    cells = []
    for row in rows:
        ours = row["ours"]
        cells.append(
            [
                row["name"],
                row["source"],
                f"{row['bits']:.2f}",
                kl_text(row["kl"]),
                "-" if ours is None else kl_text(ours["kl"]),
                "-" if ours is None else f"{ours['bits']:.2f} ({ours['padded_bits']:.2f}), {ours['window']}",
                "-" if ours is None else f"{ours['kl']['mean'] / row['kl']['mean']:.2f}",
                VERDICTS["none" if ours is None else ours["lower"]],
            ]
        )
    headers = ["recipe", "source", "bits", "KL", "ours in as many", "its bits (padded), exact tokens", "ratio", "lower"]
    return Table(headers, cells)


def _search_table(rows: Sequence[Row]) -> Table:
    cells = [
        [
            row["budget"],
            row["window"],
            f"{row['bits']:.2f} ({row['padded_bits']:.2f})",
            kl_text(row["kl"]),
            "-" if row["uniform"] is None else f"{kl_text(row['uniform']['kl'])} ({row['uniform']['name']})",
            "-" if row["uniform"] is None else f"{row['kl']['mean'] / row['uniform']['kl']['mean']:.2f}",
        ]
        for row in rows
    ]
    headers = ["ours", "exact tokens", "stored bits (padded)", "KL", "best uniform alike", "ratio"]
    return Table(headers, cells)


@style.picture
def picture(figure: Figure, result: Mapping[str, Any]) -> None:
    """KL by stored bits, a panel for each context; ours as fronts."""
    figure.set_size_inches(7.6 * len(result["contexts"]), 5)
    panels = figure.subplots(1, len(result["contexts"]), sharey=True, squeeze=False)[0]
    for panel, context in zip(panels, result["contexts"], strict=True):
        _draw_context(panel, context)
    for panel, context in zip(panels, result["contexts"], strict=True):  # with the limits of all panels
        style.log_kl_axis(panel)
        rows = [*context["recipes"], *context["searches"]]
        labels = [style.Label(row["name"], row["bits"], row["kl"]["mean"]) for row in context["recipes"]]
        style.place_labels(panel, labels, [(row["bits"], row["kl"]["mean"]) for row in rows])
    panels[0].legend(loc="upper right")


def _draw_context(panel: Axes, context: Mapping[str, Any]) -> None:
    windows = dict.fromkeys(row["window"] for row in context["searches"])
    for window, colour in zip(windows, (style.BLUE, style.SKY, style.GREEN), strict=False):
        front = sorted((row["bits"], row["kl"]["mean"]) for row in context["searches"] if row["window"] == window)
        label = f"ours, exact tokens: {window}"
        panel.plot(*zip(*front, strict=True), marker="*", ms=11, lw=1.5, color=colour, label=label, zorder=3)
    for row in context["recipes"]:
        marker, colour = FAMILIES[row["family"]]
        bits, kl = row["bits"], row["kl"]
        panel.errorbar(bits, kl["mean"], yerr=kl["error"], marker=marker, color=colour, mec=style.INK, ms=7, ls="")
    panel.set(yscale="log", xlabel="stored bits per element", title=f"{context['tokens']} tokens of context")
    panel.margins(0.08)
