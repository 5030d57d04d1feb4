"""The dry run of a search: geometry, bytes per token and the work ahead, from the configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtuner.evaluation.validation import uniform_pairs
from kvtuner.exported_configs.scheme_names import REFERENCE
from kvtuner.pipeline.options import CalibrateOptions, SearchOptions
from kvtuner.pipeline.stages.search_run import calibration_options, checked_shape, row_shape, serving_ranks
from kvtuner.pipeline.stages.search_targets import targets_of
from kvtuner.pipeline.stages.work_ahead import forward_tokens_ahead, weight_reads_ahead
from kvtuner.precision import PrecisionPair, effective_bits, mean_bits, tokens_per_gib
from kvtuner.report.formatting import count
from kvtuner.report.search_data import rank_text
from kvtuner.report.table import Table
from kvtuner.search_spaces.budget import SMALLEST_PAIR

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def dry_run_facts(options: CalibrateOptions) -> dict[str, Any]:
    """All that is known before weights are loaded; bytes are of the fullest rank, bits of the whole model."""
    shape = checked_shape(options)
    quant = calibration_options(options.measurement, shape).quant
    targets = targets_of(options, shape, quant) if isinstance(options, SearchOptions) else []
    tp_size, pp_size = (options.tp_size, options.pp_size) if isinstance(options, SearchOptions) else (1, 1)
    ranks = serving_ranks(quant, shape, tp_size=tp_size, pp_size=pp_size)
    geometry, rows = shape.geometry, row_shape(quant, shape)
    constraints = [target.constraint for target in targets if target.constraint is not None]
    index = shape.cache.index_bytes()

    def row(name: str, pairs: Sequence[PrecisionPair]) -> dict[str, Any]:
        stored = ranks.bytes_per_token(pairs)
        return {
            "name": name,
            "mean_bits": float(mean_bits(pairs, rows)),
            "effective_bits": round(float(effective_bits(pairs, rows)), 4),
            "bytes_per_token": stored,
            "tokens_per_gib": tokens_per_gib(stored + index),
            "inside": [c.budget.text for c in constraints if c.is_met(pairs)],
        }

    uniforms = [
        row(REFERENCE if pair == PrecisionPair(16, 16) else str(pair), [pair] * geometry.num_layers)
        for pair in (PrecisionPair(16, 16), *uniform_pairs(quant.widths, geometry))
    ]
    ahead = forward_tokens_ahead(options, shape, quant, targets)
    reads = weight_reads_ahead(options, shape, quant, targets)
    window = options.measurement.window
    copies = ranks.window_bytes([SMALLEST_PAIR] * geometry.num_layers, window)
    return {
        **({"index_bytes_per_token": index} if index else {}),
        **({"window": str(window), "window_bytes_per_request": copies} if window.num_tokens else {}),
        "model": options.model.model,
        "architecture": shape.architecture,
        "context_length": shape.context_length,
        "geometry": geometry.as_dict(),
        "tp_size": tp_size,
        "pp_size": pp_size,
        "uniform": uniforms,
        "hand_written": [row(target.asked, target.pairs) for target in targets if target.pairs is not None],
        "budgets": [
            {"asked": c.budget.text, "smallest": c.smallest(), "padded": _padded(c.budget.text, uniforms)}
            for c in constraints
        ],
        "forward_tokens": {**ahead, "total": sum(ahead.values())},
        **({"weight_reads": {**reads, "total": sum(reads.values())}} if options.stream else {}),
    }


def dry_run_lines(facts: dict[str, Any]) -> list[str]:
    """The facts of a dry run for a person."""
    geometry = ", ".join(f"{name} {value}" for name, value in facts["geometry"].items() if value)
    lines = [
        f"{facts['model']} ({facts['architecture']}), context {facts['context_length']}",
        f"{geometry}\n",
        *_sizes(facts).lines(),
    ]
    if "index_bytes_per_token" in facts:
        lines.append(f"each token also has keys of indexes: {count(facts['index_bytes_per_token'])} bytes in fp8")
    if "window" in facts:
        lines.append(f"each request also keeps {facts['window']}: {count(facts['window_bytes_per_request'])} bytes")
    if text := rank_text(facts["tp_size"], facts["pp_size"]):
        lines.append(f"bytes and tokens are those{text}")
    if smallest := dict.fromkeys(row["smallest"] for row in facts["budgets"]):
        lines.append(f"smallest budget for this model: {', '.join(smallest)}")
    lines += [
        f"budget {row['asked']}: {wider['uniform']} takes the {count(wider['bytes_per_token'])} bytes of"
        f" {wider['inside']}, whose rows are padded more; --budget {wider['bytes_per_token']}B/token holds it"
        for row in facts["budgets"]
        for wider in row["padded"]
    ]
    lines += ["\nforward tokens, at most:", *_work(facts["forward_tokens"])]
    if "weight_reads" in facts:
        lines += ["\nreads of all layers from their files, at most:", *_work(facts["weight_reads"])]
    return lines


def _padded(asked: str, uniforms: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The uniforms that a budget does not hold, though they take the bytes of one inside, with that one."""
    inside = {row["bytes_per_token"]: row["name"] for row in uniforms if asked in row["inside"]}
    return [
        {"uniform": row["name"], "inside": inside[stored], "bytes_per_token": stored}
        for row in uniforms
        if asked not in row["inside"] and (stored := row["bytes_per_token"]) in inside
    ]


def _work(ahead: Mapping[str, int]) -> list[str]:
    return Table(("", ""), [(f"  {name}", count(number)) for name, number in ahead.items()]).lines()


def _sizes(facts: dict[str, Any]) -> Table:
    rows = [
        (
            *(row["name"], f"{row['mean_bits']:.2f}", f"{row['effective_bits']:.3f}"),
            *(count(row["bytes_per_token"]), count(row["tokens_per_gib"]), " ".join(row["inside"])),
        )
        for row in [*facts["uniform"], *({**row, "name": "hand-written"} for row in facts["hand_written"])]
    ]
    headers = ("uniform", "mean bits", "effective", "bytes/token", "tokens/GiB", "inside")
    return Table(headers, rows, left=(0, 5))
