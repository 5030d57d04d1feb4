"""Tiny models with long contexts, what transformers says after prompts, and how far an engine may differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtuner.runtime_loader.engine.generation import Completion
from kvtuner.runtime_loader.engine.local_engine import LocalEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TIE = 1e-3
"""The gap of the two likeliest logits, of some units, below which rounding may choose either."""


@dataclass(frozen=True)
class Greedy:
    """The tokens that follow a prompt, and the gap between the two likeliest logits at each."""

    tokens: list[int]
    gaps: list[float]

    def allows(self, answer: Completion | Sequence[int]) -> bool:
        """Whether an answer is the same up to its end, or to the first tie."""
        tokens = list(answer.token_ids if isinstance(answer, Completion) else answer)
        for found, wanted, gap in zip(tokens, self.tokens, self.gaps, strict=True):
            if found != wanted:
                return gap < TIE
        return True


def prompt_of(length: int, seed: int = 0, vocab_size: int = 320) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(2, vocab_size, (length,), generator=generator).tolist()


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    """`prompt(length, seed=0)`: random tokens."""
    return prompt_of


@pytest.fixture(scope="session")
def greedy() -> Callable[..., Greedy]:
    """`greedy(model, prompt, num_tokens)`: what transformers' own generate says, through whatever end comes."""

    def say(model: Any, tokens: list[int], num_tokens: int, **kwargs: Any) -> Greedy:
        output = model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **kwargs,
        )
        logits = torch.cat(output.logits).float()
        top = logits.topk(2, dim=-1).values
        return Greedy(output.sequences[0, len(tokens) :].tolist(), (top[:, 0] - top[:, 1]).tolist())

    return say


@pytest.fixture(scope="session")
def models(make_model: Callable[..., Any]) -> Callable[..., Any]:
    """`models(family, **config_changes)`: a tiny model with a context of 4,608 tokens, one for the same arguments."""
    kept: dict[str, Any] = {}

    def model(family: str = "llama-gqa", **changes: Any) -> Any:
        key = f"{family}{sorted(changes.items())}"
        if key not in kept:
            kept[key] = make_model(family, **{"max_position_embeddings": 4608, "pad_token_id": 0, **changes})
        return kept[key]

    return model


@pytest.fixture
def engine_of() -> Iterator[Callable[..., LocalEngine]]:
    """`engine_of(model, tokenizer=None, profile=None, **options)`: an engine that is closed when the test ends."""
    engines: list[LocalEngine] = []

    def make(*args: Any, **options: Any) -> LocalEngine:
        for engine in engines:  # a model belongs to one engine at a time
            engine.close()
        engines.append(LocalEngine(*args, **options))
        return engines[-1]

    yield make
    for engine in reversed(engines):
        engine.close()
