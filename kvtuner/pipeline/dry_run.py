"""The plan of a search: geometry, bytes per token and the work ahead, from the configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtuner.calibration.window_lengths import lengths_for
from kvtuner.evaluation.validation import uniform_pairs
from kvtuner.pipeline.options import CalibrateOptions, SearchOptions
from kvtuner.pipeline.sources import corpus_source
from kvtuner.pipeline.stages.scale_words import competing_layouts
from kvtuner.pipeline.stages.search_run import calibration_options, checked_shape, row_shape, serving_ranks
from kvtuner.pipeline.stages.search_targets import SearchTarget, targets_of
from kvtuner.precision import SIDES, PrecisionPair, effective_bits, mean_bits, tokens_per_gib
from kvtuner.report.formatting import count
from kvtuner.report.search_data import rank_text
from kvtuner.report.table import Table
from kvtuner.search_spaces.budget import SMALLEST_PAIR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.model_loading import ModelShape


def plan_of_work(options: CalibrateOptions) -> dict[str, Any]:
    """All that is known before weights are loaded; bytes are of the fullest rank, bits of the whole model."""
    shape = checked_shape(options)
    quant = calibration_options(options.measurement, shape).quant
    targets = targets_of(options, shape, quant) if isinstance(options, SearchOptions) else []
    tp_size, pp_size = (options.tp_size, options.pp_size) if isinstance(options, SearchOptions) else (1, 1)
    ranks = serving_ranks(quant, shape, tp_size=tp_size, pp_size=pp_size)
    geometry, rows = shape.geometry, row_shape(quant, shape)
    constraints = [target.constraint for target in targets if target.constraint is not None]

    def row(name: str, pairs: Sequence[PrecisionPair]) -> dict[str, Any]:
        stored = ranks.bytes_per_token(pairs)
        return {
            "name": name,
            "mean_bits": float(mean_bits(pairs, rows)),
            "effective_bits": round(float(effective_bits(pairs, rows)), 4),
            "bytes_per_token": stored,
            "tokens_per_gib": tokens_per_gib(stored),
            "inside": [c.budget.text for c in constraints if c.is_met(pairs)],
        }

    window = options.measurement.window
    copies = ranks.window_bytes([SMALLEST_PAIR] * geometry.num_layers, window)
    return {
        **({"window": str(window), "window_bytes_per_request": copies} if window.num_tokens else {}),
        "model": options.model.model,
        "architecture": shape.architecture,
        "context_length": shape.context_length,
        "geometry": geometry.as_dict(),
        "tp_size": tp_size,
        "pp_size": pp_size,
        "uniform": [
            row("bf16" if pair == PrecisionPair(16, 16) else str(pair), [pair] * geometry.num_layers)
            for pair in (PrecisionPair(16, 16), *uniform_pairs(quant.widths))
        ],
        "hand_written": [row(target.asked, target.pairs) for target in targets if target.pairs is not None],
        "budgets": [{"asked": c.budget.text, "smallest": c.smallest()} for c in constraints],
        "forward_tokens": _forward_tokens(options, shape, targets),
    }


def _forward_tokens(options: CalibrateOptions, shape: ModelShape, targets: Sequence[SearchTarget]) -> dict[str, int]:
    """Tokens that each phase runs through the whole model, at most; a backward counts as two forwards."""
    measurement = options.measurement
    source = corpus_source(options.data, options.model, shape, seed=measurement.seed)
    calibrate, select, report = (count * source.sequence_length for count in source.num_sequences)
    layers = shape.geometry.num_layers
    quant = calibration_options(measurement, shape).quant
    widths = quant.widths
    isolated = sum(len(quant.transform_names(side)) for side in SIDES) + 2 * (len(widths) - 1)
    schemes = 2 * len(uniform_pairs(widths)) + 2
    # The exact model once for its statistics and once for its predictions, then both layouts at each width below 8.
    layouts = 2 * (len(widths) - 1) * len(competing_layouts(measurement, shape))
    lengths = lengths_for(source.sequence_length) if measurement.residual_length == "auto" else ()
    planned = {
        **({"window length": calibrate * (2 + 2 * len(lengths))} if lengths else {}),
        **({"scale layouts": calibrate * (2 + layouts)} if layouts else {}),
        "statistics": calibrate,
        "candidates": calibrate * (2 + 2 * measurement.fisher_draws),
        "isolated KL": calibrate * (2 + isolated * (layers + 1)) // 2 if measurement.score == "kl" else 0,
    }
    if isinstance(options, SearchOptions):
        trials = sum(1 if target.constraint is None else options.refinement_trials for target in targets)
        # The widths of keys, 16 bits among them, by those of values.
        planned["uniform table"] = select * (len(widths) + 1) ** 2
        planned["refinement" if targets[0].pairs is None else "hand-written"] = select * trials
        # Every scheme at small and at large position offsets.
        planned["validation"] = 2 * report * (schemes + len(targets))
    planned["total"] = sum(planned.values())
    return planned


def plan_lines(plan: dict[str, Any]) -> list[str]:
    """The plan for a person."""
    geometry = ", ".join(f"{name} {value}" for name, value in plan["geometry"].items() if value)
    lines = [
        f"{plan['model']} ({plan['architecture']}), context {plan['context_length']}",
        f"{geometry}\n",
        *_sizes(plan).lines(),
    ]
    if "window" in plan:
        lines.append(f"beside them, {plan['window']}: {count(plan['window_bytes_per_request'])} bytes per request")
    if text := rank_text(plan["tp_size"], plan["pp_size"]):
        lines.append(f"bytes and tokens are those{text}")
    lines += [f"budget {row['asked']}: the smallest possible is {row['smallest']}" for row in plan["budgets"]]
    work = [(f"  {name}", count(tokens)) for name, tokens in plan["forward_tokens"].items()]
    return [*lines, "\nforward tokens, at most:", *Table(("", ""), work).lines()]


def _sizes(plan: dict[str, Any]) -> Table:
    rows = [
        (
            *(row["name"], f"{row['mean_bits']:.2f}", f"{row['effective_bits']:.3f}"),
            *(count(row["bytes_per_token"]), count(row["tokens_per_gib"]), " ".join(row["inside"])),
        )
        for row in [*plan["uniform"], *({**row, "name": "hand-written"} for row in plan["hand_written"])]
    ]
    headers = ("uniform", "mean bits", "effective", "bytes/token", "tokens/GiB", "inside")
    return Table(headers, rows, left=(0, 5))
