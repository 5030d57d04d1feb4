"""A twin of a model with outlier key channels, and exactly the same function.

    python -m kvtuner.calibration.demo.outliers --model demo --out twin

In some rotary pairs of every KV head the keys are multiplied by a power of two and the queries that read them divided
by it, in the projections' weights and biases. Both channels of a pair are turned by the same angle, so that every score
is the same number. This is what breaks 4-bit keys of Qwen2.5, where biases put some channels far from the others.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvtuner.calibration.model_loading import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FACTOR = 32.0
PAIRS_PER_HEAD = 3


def add_outliers(model: PreTrainedModel, *, factor: float, pairs_per_head: int, seed: int) -> None:
    """Rescale rotary pairs of each KV head of each layer in place; `seed` chooses the pairs.

    The model is like Llama or Qwen2: `q_proj`, `k_proj`, channel i rotated with i + head_dim / 2, no QK norm. The
    factor is a power of two, so that every product is exact.
    """
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    group = config.num_attention_heads // config.num_key_value_heads
    rng = random.Random(seed)
    decoder: Any = model.get_decoder()
    with torch.no_grad():
        for layer in decoder.layers:
            factors = torch.ones(config.num_key_value_heads, head_dim)
            for head_factors in factors:
                channels = torch.tensor(rng.sample(range(head_dim // 2), pairs_per_head))
                head_factors[torch.cat((channels, channels + head_dim // 2))] = factor
            _scale(layer.self_attn.k_proj, factors.flatten())
            _scale(layer.self_attn.q_proj, 1 / factors.repeat_interleave(group, dim=0).flatten())


def _scale(projection: torch.nn.Linear, factors: torch.Tensor) -> None:
    factors = factors.to(projection.weight.dtype)
    projection.weight.mul_(factors.unsqueeze(1))
    if projection.bias is not None:
        projection.bias.mul_(factors)


def make_twin(
    source: str, out: Path, *, factor: float = FACTOR, pairs_per_head: int = PAIRS_PER_HEAD, seed: int = 0
) -> None:
    """Load a model in its own dtype, add outliers, save it with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = ModelSource(source).path
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    add_outliers(model, factor=factor, pairs_per_head=pairs_per_head, seed=seed)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(path).save_pretrained(out)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--factor", type=float, default=FACTOR)
    parser.add_argument("--pairs-per-head", type=int, default=PAIRS_PER_HEAD)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_twin(args.model, args.out, factor=args.factor, pairs_per_head=args.pairs_per_head, seed=args.seed)


if __name__ == "__main__":
    main()
