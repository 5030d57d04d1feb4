"""``--dry-run``: geometry, bytes per token and the work ahead, from the configuration alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtuner.cli.session import corpus_source, row_shape
from kvtuner.evaluation.validation import UNIFORM_PAIRS
from kvtuner.precision import PACKED_BITS, PrecisionPair, bytes_per_token, effective_bits, mean_bits
from kvtuner.quant import KEY_TRANSFORMS, VALUE_TRANSFORMS

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from kvtuner.calibration.model import ModelShape
    from kvtuner.search_spaces.budget import Budget, Constraint

GIB = 1 << 30


def plan_of_work(args: Namespace, shape: ModelShape, budgets: Sequence[tuple[Budget, Constraint]]) -> dict[str, Any]:
    """All that is known before weights are loaded; bytes are of the whole model on one rank."""
    geometry, rows = shape.geometry, row_shape(args, shape)
    num_layers = geometry.num_layers

    def row(pair: PrecisionPair) -> dict[str, Any]:
        pairs = [pair] * num_layers
        stored = bytes_per_token(pairs, rows)
        return {
            "name": "bf16" if pair == PrecisionPair(16, 16) else str(pair),
            "mean_bits": float(mean_bits(pairs, rows)),
            "effective_bits": round(float(effective_bits(pairs, rows)), 4),
            "bytes_per_token": stored,
            "tokens_per_gib": GIB // stored,
            "inside": [budget.text for budget, constraint in budgets if constraint.is_met(pairs)],
        }

    return {
        "model": args.model,
        "architecture": shape.architecture,
        "context_length": shape.context_length,
        "geometry": geometry.as_dict(),
        "uniform": [row(pair) for pair in (PrecisionPair(16, 16), *UNIFORM_PAIRS)],
        "budgets": [{"asked": budget.text, "smallest": constraint.smallest()} for budget, constraint in budgets],
        "forward_tokens": forward_tokens(args, shape, len(budgets)),
    }


def forward_tokens(args: Namespace, shape: ModelShape, num_budgets: int) -> dict[str, int]:
    """Tokens that each phase runs through the whole model, at most; a backward counts as two forwards."""
    source = corpus_source(args, shape)
    calibrate, select, report = (count * source.sequence_length for count in source.num_sequences)
    layers = shape.geometry.num_layers
    isolated = len(KEY_TRANSFORMS) + len(VALUE_TRANSFORMS) + 2 * (len(PACKED_BITS) - 1)
    contestants = 2 * len(UNIFORM_PAIRS) + 2
    planned = {
        "statistics": calibrate,
        "candidates": calibrate * (2 + 2 * args.fisher_draws),
        "isolated KL": (calibrate * (2 + isolated * (layers + 1)) // 2 if args.score == "kl" else 0),
    }
    if num_budgets:
        planned["uniform table"] = select * 16
        planned["refinement"] = select * args.trials * num_budgets
        planned["validation"] = 2 * report * (contestants + num_budgets)
    planned["total"] = sum(planned.values())
    return planned


def print_plan(plan: dict[str, Any], *, as_json: bool) -> None:
    """Print it for a person or a program."""
    if as_json:
        print(json.dumps(plan, indent=1))
        return
    geometry = ", ".join(f"{name} {value}" for name, value in plan["geometry"].items() if value)
    print(f"{plan['model']} ({plan['architecture']}), context {plan['context_length']}\n{geometry}\n")
    print(f"{'uniform':<8}{'mean bits':>10}{'effective':>11}{'bytes/token':>13}{'tokens/GiB':>12}  inside")
    for row in plan["uniform"]:
        print(
            f"{row['name']:<8}{row['mean_bits']:>10.2f}{row['effective_bits']:>11.3f}{row['bytes_per_token']:>13,}"
            f"{row['tokens_per_gib']:>12,}  {' '.join(row['inside'])}"
        )
    for budget in plan["budgets"]:
        print(f"budget {budget['asked']}: the smallest possible is {budget['smallest']}")
    print("\nforward tokens, at most:")
    for name, tokens in plan["forward_tokens"].items():
        print(f"  {name:<14}{tokens:>14,}")
