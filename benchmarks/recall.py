"""Key-value recall of a model by exact match, unquantized and with uniform or searched caches that hold packed rows.

    python benchmarks/recall.py --model demo --pairs 30 --problems 20 [--profile profile.json ...]

Prompts are tables of two-letter keys and three-digit values; the model then completes lines, greedily, one question at
a time: the prompt is prefilled exactly, everything after it reads the packed cache (read plan `decode`).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvtuner.calibration.demo.tasks import VALUE_DIGITS, RecallProblem, recall_problem
from kvtuner.calibration.model import ModelSource, read_shape
from kvtuner.exported_configs.build import uniform_profile
from kvtuner.exported_configs.identity import identity_of
from kvtuner.exported_configs.load import load_profile
from kvtuner.precision import PrecisionPair
from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvtuner.calibration.model import ModelShape
    from kvtuner.exported_configs.profile import Profile


def uniform_of(shape: ModelShape, pair: PrecisionPair) -> Profile:
    """A profile of the model with the same widths everywhere and no transforms."""
    identity = identity_of(shape.config, id="model", revision=None, dtype="float32")
    return uniform_profile(shape.geometry, pair, identity)


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problem: RecallProblem,
    question: int,
    profile: Profile | None,
) -> str:
    """What the model says the value of one key is."""
    key, _ = problem.table[question]
    prompt = tokenizer(problem.prompt, return_tensors="pt").input_ids
    asked = tokenizer(f"{key}:", add_special_tokens=False, return_tensors="pt").input_ids
    cache = None if profile is None else KVTunerCache.from_profile(profile, model.config)
    output = model(prompt, past_key_values=cache, use_cache=True)
    cache = output.past_key_values
    digits: list[int] = []
    step = asked
    for _ in range(VALUE_DIGITS):
        token = model(step, past_key_values=cache, use_cache=True).logits[0, -1].argmax()
        digits.append(int(token))
        step = token.reshape(1, 1)
    return str(tokenizer.decode(digits))


def exact_match(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    profile: Profile | None,
    *,
    num_pairs: int,
    num_problems: int,
    num_questions: int,
    seed: int,
) -> float:
    """Share of questions answered right to the last digit."""
    rng = random.Random(seed)
    right = total = 0
    for _ in range(num_problems):
        problem = recall_problem(rng, num_pairs, num_questions)
        for question in problem.questions:
            right += answer(model, tokenizer, problem, question, profile) == problem.table[question][1]
            total += 1
    return right / total


def main() -> None:
    """Command line."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pairs", type=int, nargs="+", default=[30])
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--questions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--uniform", nargs="*", default=["K8V8", "K4V4", "K4V2", "K2V2"])
    parser.add_argument("--profile", type=Path, nargs="*", default=[])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    source = ModelSource(args.model)
    shape = read_shape(source)
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    profiles: dict[str, Profile | None] = {"unquantized": None}
    profiles |= {text: uniform_of(shape, PrecisionPair.parse(text)) for text in args.uniform}
    profiles |= {str(path): load_profile(path) for path in args.profile}
    rows = [
        {
            "cache": name,
            "pairs": num_pairs,
            "exact_match": exact_match(
                model,
                tokenizer,
                profile,
                num_pairs=num_pairs,
                num_problems=args.problems,
                num_questions=args.questions,
                seed=args.seed,
            ),
        }
        for num_pairs in args.pairs
        for name, profile in profiles.items()
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['pairs']:>4} pairs  {row['cache']:<40}{row['exact_match']:>8.1%}")


if __name__ == "__main__":
    main()
