"""Asking a model on the transformers host, whatever way its cache is stored and by any read plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.model import LoadedModel
    from kvtuner.evaluation.questions import Problem
    from kvtuner.evaluation.subjects import Subject
    from kvtuner.exported_configs.evidence import ReadPlan


class Offline:
    """A loaded model that answers greedily.

    A context is one chunk and what follows it another, so that by the plan ``decode`` the context is read exactly while
    it is prefilled, and quantized by all that follows.

    Args:
        loaded: the model.
        read_plan: what a chunk reads.
    """

    def __init__(self, loaded: LoadedModel, read_plan: ReadPlan) -> None:
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self.read_plan = read_plan

    def count_tokens(self, text: str) -> int:
        """Of a text, without special tokens."""
        return len(self._ids(text, special=False))

    def answers(self, subject: Subject, problem: Problem, *, offset: int = 0) -> tuple[str, ...]:
        """What is said after each question of a problem, long enough to see whether it is right.

        Args:
            subject: how the cache is stored.
            problem: context and questions.
            offset: position of the context's first token.
        """
        cache = subject.cache(self._model.config, self.read_plan)
        context = self._ids(problem.context, special=True)
        self._step(context, cache, offset)
        found = []
        for question in problem.questions:
            asked = self._ids(question.text, special=False)
            said = self._continue(asked, cache, offset, self.count_tokens(question.answer) + 1)
            found.append(str(self._tokenizer.decode(said, skip_special_tokens=True)))
            cache.crop(len(context) - cache.get_seq_length())
        return tuple(found)

    def continuation(self, subject: Subject, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy tokens after a prompt, up to the end of the text."""
        cache = subject.cache(self._model.config, self.read_plan)
        return self._continue(prompt, cache, 0, num_tokens)

    @torch.no_grad()
    def _continue(self, ids: Sequence[int], cache: Any, offset: int, num_tokens: int) -> list[int]:
        said: list[int] = []
        step = ids
        ends = self._end_tokens()
        while len(said) < num_tokens and (not said or said[-1] not in ends):
            said.append(int(self._step(step, cache, offset).argmax()))
            step = said[-1:]
        return said

    @torch.no_grad()
    def _step(self, ids: Sequence[int], cache: Any, offset: int) -> torch.Tensor:
        first = cache.get_seq_length()
        device = next(iter(self._model.get_input_embeddings().parameters())).device
        tokens = torch.tensor([list(ids)], device=device)
        positions = torch.arange(first + offset, first + offset + len(ids), device=device).unsqueeze(0)
        output = self._model(tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _end_tokens(self) -> set[int]:
        configured = self._model.generation_config.eos_token_id if self._model.generation_config else None
        return set(configured if isinstance(configured, list) else [configured])

    def _ids(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special, truncation=False, verbose=False)["input_ids"])
