"""The parameters that a token meets in a model with experts, by names and shapes. Knows no weights."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The fields of a configuration with the number of experts, and of those that a token reaches, by family of models.
EXPERT_COUNTS: Final = (
    ("num_local_experts", "num_experts_per_tok"),
    ("num_experts", "num_experts_per_tok"),
    ("n_routed_experts", "num_experts_per_tok"),
    ("moe_num_experts", "moe_k"),
    ("num_experts", "moe_topk"),
)
_EXPERTS: Final = ".experts."  # part of the names that transformers gives the weights of most families' experts
_ONE_EXPERT: Final = re.compile(r"\.experts\.\d+\.")


def reached_elements(text_config: Any, shapes: Mapping[str, Sequence[int]]) -> Fraction | None:
    """The elements of weights, by their shapes, that a token meets: of experts, those of the ones that it goes to.

    It is None where there are experts, but the configuration has other names for their numbers.
    """
    counts = _counts(text_config)
    total = Fraction(0)
    for name, shape in shapes.items():
        share = Fraction(1)
        if _is_of_experts(name, shape, counts):
            if counts is None:
                return None
            share = Fraction(counts[1], counts[0])
        total += share * math.prod(shape)
    return total


def _counts(text_config: Any) -> tuple[int, int] | None:
    """The experts of a layer, and those that a token reaches."""
    for total, reached in EXPERT_COUNTS:
        if getattr(text_config, total, None) and getattr(text_config, reached, None):
            return getattr(text_config, total), getattr(text_config, reached)
    return None


def _is_of_experts(name: str, shape: Sequence[int], counts: tuple[int, int] | None) -> bool:
    """Whether a token may miss a part of a parameter; what chooses experts, or is added for all, it meets whole."""
    if "router" in name:
        return False
    # JetMoE stacks the matrices of experts under names of its own.
    is_stacked = counts is not None and len(shape) > 2 and shape[0] == counts[0]
    return is_stacked or bool(_ONE_EXPERT.search(name)) or (_EXPERTS in name and len(shape) > 1)
