"""Asking a model on the transformers host, whatever way its cache is stored and by any read plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvtuner.errors import NonFiniteActivationError
from kvtuner.evaluation.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        subject: how its cache is stored.
        read_plan: what a chunk reads.
    """

    def __init__(self, loaded: LoadedModel, subject: Subject, read_plan: ReadPlan) -> None:
        self._model, self._subject, self._read_plan = loaded.model, subject, read_plan
        self._text, self._context_length = Text(loaded.tokenizer), loaded.shape.context_length
        ends = self._model.generation_config.eos_token_id if self._model.generation_config else None
        self._ends = set(ends if isinstance(ends, list) else [ends])

    @property
    def name(self) -> str:
        """Of the way that the cache is stored."""
        return self._subject.name

    @property
    def key(self) -> str:
        """What decides answers besides the questions and the model."""
        return self._subject.contestant.key

    def answers(self, problem: Problem, *, offset: int = 0) -> tuple[str, ...]:
        """What is said after each question of a problem, long enough to see whether it is right.

        Args:
            problem: context and questions.
            offset: position of the context's first token.
        """
        cache = self._cache()
        context = self._text.context(problem.context)
        self._step(context, cache, offset)
        found = []
        for question in problem.questions:
            asked = self._text.after(problem.context, question.text)
            found.append(self._continue(asked, cache, offset, question.max_tokens, question.is_answered))
            cache.crop(len(context) - cache.get_seq_length())
        return tuple(found)

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> str:
        """What is said after a prompt, up to the end of the text.

        Args:
            prompt: token ids.
            num_tokens: at most.
        """
        return self._continue(prompt, self._cache(), 0, num_tokens)

    def _cache(self) -> Any:
        return self._subject.cache(self._model.config, self._read_plan, self._context_length)

    def _continue(
        self,
        ids: Sequence[int],
        cache: Any,
        offset: int,
        num_tokens: int,
        is_done: Callable[[str], bool] = lambda _: False,
    ) -> str:
        said: list[int] = []
        step, text = ids, ""
        while len(said) < num_tokens and not is_done(text):
            said.append(int(self._step(step, cache, offset).argmax()))
            step, text = said[-1:], self._text.of(said)
            if said[-1] in self._ends:
                break
        return text

    @torch.no_grad()
    def _step(self, ids: Sequence[int], cache: Any, offset: int) -> torch.Tensor:
        first = cache.get_seq_length()
        device = next(iter(self._model.get_input_embeddings().parameters())).device
        tokens = torch.tensor([list(ids)], device=device)
        positions = torch.arange(first + offset, first + offset + len(ids), device=device).unsqueeze(0)
        output = self._model(tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        if not bool(torch.isfinite(logits).all()):
            raise NonFiniteActivationError(
                f"the model gives NaN or infinity where its cache is stored as {self.name}; run it in a wider dtype"
            )
        return logits
