"""Architectures, prompts, batches, pages, chunks, hits, eviction, retraction and backends together say what models say.

Every pair of options runs, but for more than 600 steps; those and all products are marked `full`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from option_rows.covering_rows import every_row, name_of
from option_rows.engine_rows import CHOICES, NUM_FAMILIES, answered, every_pair, memory_of, options_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from option_rows.covering_rows import Row

    from kvtuner.runtime_loader.engine.generation import Completion
    from kvtuner.runtime_loader.engine.local_engine import LocalEngine

    Refused = Callable[[Row], list[Completion]]

ALL = {**CHOICES, "eviction": ("lru", "lfu", "fifo", "mru")}
INTERPRETED = {**CHOICES, "attention": ("triton",), "chunk_tokens": (1, 7, 512), "load": ("tiny",)}
TIE = 1e-3
"""The gap of the two likeliest logits, of some units, below which rounding may choose either."""


def evicts(row: Row) -> bool:
    """Whether a row's policy of eviction matters, or is the first one."""
    return row["eviction"] == "lru" or (row["hits"] and row["at_once"] == "full pool")


@dataclass(frozen=True)
class Oracle:
    """The logits of transformers' models, each read once for the same tokens.

    Greedy `generate` says an answer if each of its tokens is the likeliest behind all that are before it.
    """

    logits: dict[tuple[Any, ...], torch.Tensor]

    def allows(self, model: Any, answer: Completion) -> bool:
        """Whether each token of an answer is the likeliest one, or tied with it."""
        tokens = (*answer.prompt_token_ids, *answer.token_ids)
        logits = self.logits.get((id(model), *tokens))
        if logits is None:
            with torch.no_grad():
                output = model(torch.tensor([tokens[:-1]]), use_cache=False, logits_to_keep=len(answer.token_ids))
            logits = self.logits[(id(model), *tokens)] = output.logits[0]
        chosen = logits.gather(1, torch.tensor(answer.token_ids).unsqueeze(1))[:, 0]
        return bool((logits.amax(-1) - chosen < TIE).all())


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle({})


@pytest.fixture
def refused(
    families: Sequence[str], models: Any, prompt: Any, engine_of: Callable[..., LocalEngine], oracle: Oracle
) -> Refused:
    """`refused(row)`: the answers of an engine with these options that are not those of the model."""

    def run(row: Row) -> list[Completion]:
        model, options = models(families[row["family"]]), options_of(row)
        memory = memory_of(row, engine_of(model, **options).pool.shape)
        engine = engine_of(model, kv_memory=memory, **options)
        answers = answered(row, engine, prompt)
        engine.close()
        return [answer for answer in answers if not oracle.allows(model, answer)]

    return run


def test_the_rows_have_every_family(families: Sequence[str]) -> None:
    assert len(families) == NUM_FAMILIES


@pytest.mark.parametrize("row", every_pair(ALL))
def test_every_pair_of_options_says_what_the_model_says(row: Row, refused: Refused) -> None:
    assert refused(row) == []


@pytest.mark.full
@pytest.mark.parametrize("row", every_pair(INTERPRETED))
def test_every_pair_of_options_under_tritons_interpreter(row: Row, refused: Refused) -> None:
    assert refused(row) == []


@pytest.mark.full
@pytest.mark.parametrize(
    "shared", every_row({name: CHOICES[name] for name in ("family", "attention", "load", "page_size")}), ids=name_of
)
def test_all_options_together_say_what_the_model_says(shared: Row, refused: Refused) -> None:
    for row in every_row({**ALL, **{name: (value,) for name, value in shared.items()}}, evicts):
        assert refused(row) == []
