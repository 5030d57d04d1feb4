"""``--dry-run``: geometry, bytes per token and the work ahead, from the configuration alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtuner.evaluation.validation import UNIFORM_PAIRS
from kvtuner.pipeline.session import corpus_source, ranks_of, row_shape
from kvtuner.precision import PACKED_BITS, PrecisionPair, effective_bits, mean_bits, tokens_per_gib
from kvtuner.report.search_data import rank_text
from kvtuner.transforms import candidate_transforms

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.pipeline.targets import SearchTarget


def plan_of_work(args: Namespace, shape: ModelShape, targets: Sequence[SearchTarget]) -> dict[str, Any]:
    """All that is known before weights are loaded; bytes are of the fullest rank, bits of the whole model."""
    geometry, rows, ranks = shape.geometry, row_shape(args, shape), ranks_of(args, shape)
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

    return {
        "model": args.model,
        "architecture": shape.architecture,
        "context_length": shape.context_length,
        "geometry": geometry.as_dict(),
        "tp_size": getattr(args, "tp_size", 1),
        "pp_size": getattr(args, "pp_size", 1),
        "uniform": [
            row("bf16" if pair == PrecisionPair(16, 16) else str(pair), [pair] * geometry.num_layers)
            for pair in (PrecisionPair(16, 16), *UNIFORM_PAIRS)
        ],
        "hand_written": [row(target.asked, target.pairs) for target in targets if target.pairs is not None],
        "budgets": [{"asked": c.budget.text, "smallest": c.smallest()} for c in constraints],
        "forward_tokens": forward_tokens(args, shape, targets),
    }


def forward_tokens(args: Namespace, shape: ModelShape, targets: Sequence[SearchTarget]) -> dict[str, int]:
    """Tokens that each phase runs through the whole model, at most; a backward counts as two forwards."""
    source = corpus_source(args, shape)
    calibrate, select, report = (count * source.sequence_length for count in source.num_sequences)
    layers = shape.geometry.num_layers
    isolated = len(candidate_transforms("k")) + len(candidate_transforms("v")) + 2 * (len(PACKED_BITS) - 1)
    schemes = 2 * len(UNIFORM_PAIRS) + 2
    planned = {
        "statistics": calibrate,
        "candidates": calibrate * (2 + 2 * args.fisher_draws),
        "isolated KL": (calibrate * (2 + isolated * (layers + 1)) // 2 if args.score == "kl" else 0),
    }
    if targets:
        trials = sum(1 if target.constraint is None else args.trials for target in targets)
        planned["uniform table"] = select * 16
        planned["refinement" if targets[0].pairs is None else "hand-written"] = select * trials
        planned["validation"] = 2 * report * (schemes + len(targets))
    planned["total"] = sum(planned.values())
    return planned


def print_plan(plan: dict[str, Any], *, as_json: bool) -> None:
    """Print it for a person or a program."""
    if as_json:
        print(json.dumps(plan, indent=1))
        return
    geometry = ", ".join(f"{name} {value}" for name, value in plan["geometry"].items() if value)
    print(f"{plan['model']} ({plan['architecture']}), context {plan['context_length']}\n{geometry}\n")
    print(f"{'uniform':<14}{'mean bits':>10}{'effective':>11}{'bytes/token':>13}{'tokens/GiB':>12}  inside")
    for row in [*plan["uniform"], *({**row, "name": "hand-written"} for row in plan["hand_written"])]:
        print(
            f"{row['name']:<14}{row['mean_bits']:>10.2f}{row['effective_bits']:>11.3f}{row['bytes_per_token']:>13,}"
            f"{row['tokens_per_gib']:>12,}  {' '.join(row['inside'])}"
        )
    if words := rank_text(plan["tp_size"], plan["pp_size"]):
        print(f"bytes and tokens are those{words}")
    for budget in plan["budgets"]:
        print(f"budget {budget['asked']}: the smallest possible is {budget['smallest']}")
    print("\nforward tokens, at most:")
    for name, tokens in plan["forward_tokens"].items():
        print(f"  {name:<14}{tokens:>14,}")
