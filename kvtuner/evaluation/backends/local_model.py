"""Asking a model on the transformers host, whatever way its cache is stored and by any read plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.errors import NonFiniteActivationError
from kvtuner.evaluation.token_text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtuner.calibration.model_loading import LoadedModel
    from kvtuner.evaluation.scheme import CacheScheme
    from kvtuner.evaluation.tasks.questions import Problem
    from kvtuner.exported_configs.profile.evidence import ReadPlan as ReadPlanName


class Offline:
    """A loaded model that answers greedily.

    A context is one chunk and what follows it another, so that by the plan ``decode`` the context is read exactly while
    it is prefilled, and quantized by all that follows.

    Args:
        loaded: the model.
        subject: how its cache is stored.
        read_plan: what a chunk reads.
    """

    def __init__(self, loaded: LoadedModel, subject: CacheScheme, read_plan: ReadPlanName) -> None:
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
        return self._subject.key

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

    def continuation(self, prompt: Sequence[int], num_tokens: int, is_done: Callable[[str], bool] | None = None) -> str:
        """What is said after a prompt, up to the end of the text.

        Args:
            prompt: token ids.
            num_tokens: at most.
            is_done: whether what was said is enough; with it the prompt's last token is a chunk of its own, so that
                already the first token of the answer reads the prompt as it is stored.
        """
        cache = self._cache()
        if is_done is None:
            return self._continue(prompt, cache, 0, num_tokens)
        if prompt[:-1]:
            self._step(prompt[:-1], cache, 0)
        return self._continue(prompt[-1:], cache, 0, num_tokens, is_done)

    @torch.no_grad()
    def log_likelihood(
        self, context: Sequence[int], continuation: Sequence[int], *, whole: bool = False
    ) -> tuple[float, bool]:
        """Log-probability of a continuation, nats, and whether it is what would be said greedily.

        Args:
            context: token ids, one at least; all but the last are a chunk of their own.
            continuation: token ids.
            whole: the first quarter of both is that chunk instead, as the tuner measures.
        """
        cache, ids = self._cache(), [*context, *continuation][:-1]
        split = ReadPlan.of(self._read_plan, len(ids) + 1).split if whole else len(context) - 1
        chunks = [chunk for chunk in (ids[:split], ids[split:]) if chunk]
        logits = torch.cat([self._logits(chunk, cache, 0, len(chunk)) for chunk in chunks])[-len(continuation) :]
        targets = torch.tensor(list(continuation), device=logits.device)
        log_p = logits.double().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).sum()
        return float(log_p), bool((logits.argmax(-1) == targets).all())

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

    def _step(self, ids: Sequence[int], cache: Any, offset: int) -> torch.Tensor:
        return self._logits(ids, cache, offset, 1)[-1]

    @torch.no_grad()
    def _logits(self, ids: Sequence[int], cache: Any, offset: int, kept: int) -> torch.Tensor:
        """Of the last `kept` tokens, [kept, vocab_size]."""
        first = cache.get_seq_length()
        device = next(iter(self._model.get_input_embeddings().parameters())).device
        tokens = torch.tensor([list(ids)], device=device)
        positions = torch.arange(first + offset, first + offset + len(ids), device=device).unsqueeze(0)
        output = self._model(tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=kept)
        logits: torch.Tensor = output.logits[0]
        if not bool(torch.isfinite(logits).all()):
            raise NonFiniteActivationError(
                f"the model gives NaN or infinity where its cache is stored as {self.name}; run it in a wider dtype"
            )
        return logits
