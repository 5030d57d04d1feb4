"""A model loaded here, which answers by any scheme and any read plan."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.errors import NonFiniteActivationError, UnsupportedModelError
from kvtuner.evaluation.backends.base import Backend, HitCount, TextTokenizer
from kvtuner.exported_configs.profile.evaluation_record import BackendRecord
from kvtuner.runtime_loader.transformers_cache import KVTunerCache
from kvtuner.supported_models import has_states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtuner.calibration.model_loading import LoadedModel
    from kvtuner.evaluation.cache_scheme import CacheScheme
    from kvtuner.evaluation.tasks.recall_and_needles import Problem
    from kvtuner.read_plan_names import ReadPlanName


class LocalBackend(Backend):
    """A loaded model that answers greedily.

    A context is one chunk and what follows it another, so that by the plan ``decode`` the context is read exactly while
    it is prefilled, and quantized by all that follows.
    """

    hits: HitCount | None = None

    def __init__(self, loaded: LoadedModel, scheme: CacheScheme, read_plan: ReadPlanName) -> None:
        self.name, self.dtype = scheme.name, loaded.dtype_name
        self._model, self._scheme, self._read_plan = loaded.model, scheme, read_plan
        self._text, self._context_length = TextTokenizer(loaded.tokenizer), loaded.shape.context_length
        if has_states(self._model.config):
            _refuse_forgetful(self._model)
        ends = self._model.generation_config.eos_token_id if self._model.generation_config else None
        self._ends = set(ends if isinstance(ends, list) else [ends])

    @property
    def key(self) -> str:
        """The scheme's key: it decides answers, besides the questions and the model."""
        return self._scheme.key

    def record(self) -> BackendRecord:
        """This process, and its read plan."""
        return BackendRecord(kind="transformers", read_plan=self._read_plan, reads=None, version=None, hit_share=None)

    def answers(self, problem: Problem, *, offset: int = 0) -> list[str | None]:
        """The text after each question of a problem, long enough to see whether it is right."""
        cache = self._cache()
        context = self._text.context(problem.context)
        self._step(context, cache, offset)
        is_kept = not _forgets(cache)
        answers: list[str | None] = []
        for question in problem.questions:
            ids = self._text.after(problem.context, question.text)
            # A crop would leave the context without the copies or states that the question took the place of.
            asked = copy.deepcopy(cache) if is_kept else cache
            answers.append(self._continue(ids, asked, offset, question.max_tokens, question.is_answered))
            if not is_kept:
                cache.crop(len(context) - cache.get_seq_length())
        return answers

    def continuation(self, prompt: Sequence[int], num_tokens: int) -> str:
        """The text after a prompt, which is one chunk, up to its end."""
        return self._continue(prompt, self._cache(), 0, num_tokens)

    def generate_until(self, prompt: Sequence[int], num_tokens: int, stops: Sequence[str]) -> str:
        """The text after a prompt up to the first stop; already its first token reads the prompt as it is stored."""
        cache = self._cache()
        if prompt[:-1]:
            self._step(prompt[:-1], cache, 0)
        text = self._continue(prompt[-1:], cache, 0, num_tokens, lambda text: any(stop in text for stop in stops))
        return until_stop(text, stops)

    def log_likelihood(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """The log-probability of a continuation; the context's last token and the continuation are one chunk."""
        return self._log_likelihood([*context, *continuation], len(continuation), split=len(context) - 1)

    def whole_log_likelihood(self, ids: Sequence[int]) -> float:
        """The log-probability of a text, of which the first quarter is one chunk, as the tuner measures."""
        return self._log_likelihood(ids, len(ids) - 1, split=ReadPlan.of(self._read_plan, len(ids)).split)[0]

    @torch.no_grad()
    def _log_likelihood(self, ids: Sequence[int], num_scored: int, *, split: int) -> tuple[float, bool]:
        """Score the last tokens of a text, which is read in two chunks; the last token itself is never read."""
        cache = self._cache()
        chunks = [chunk for chunk in (ids[:split], ids[split:-1]) if chunk]
        logits = torch.cat([self._logits(chunk, cache, 0, len(chunk)) for chunk in chunks])[-num_scored:]
        targets = torch.tensor(list(ids[-num_scored:]), device=logits.device)
        log_p = logits.double().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).sum()
        return float(log_p), bool((logits.argmax(-1) == targets).all())

    def _cache(self) -> Any:
        return self._scheme.cache(self._model.config, self._read_plan, self._context_length)

    def _continue(
        self,
        ids: Sequence[int],
        cache: Any,
        offset: int,
        num_tokens: int,
        is_done: Callable[[str], bool] = lambda _: False,
    ) -> str:
        generated: list[int] = []
        chunk, text = ids, ""
        while len(generated) < num_tokens and not is_done(text):
            generated.append(int(self._step(chunk, cache, offset).argmax()))
            chunk, text = generated[-1:], self._text.of(generated)
            if generated[-1] in self._ends:
                break
        return text

    def _step(self, ids: Sequence[int], cache: Any, offset: int) -> torch.Tensor:
        return self._logits(ids, cache, offset, 1)[-1]

    @torch.no_grad()
    def _logits(self, ids: Sequence[int], cache: Any, offset: int, kept: int) -> torch.Tensor:
        """The logits of the last `kept` tokens, [kept, vocab_size]."""
        first = cache.get_seq_length()
        device = next(iter(self._model.get_input_embeddings().parameters())).device
        tokens = torch.tensor([list(ids)], device=device)
        positions = torch.arange(first + offset, first + offset + len(ids), device=device).unsqueeze(0)
        with cache.attending(self._model) if isinstance(cache, KVTunerCache) else nullcontext():
            output = self._model(
                tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=kept
            )
        logits: torch.Tensor = output.logits[0]
        if not bool(torch.isfinite(logits).all()):
            raise NonFiniteActivationError(
                f"the model gives NaN or infinity where its cache is stored as {self.name}; run it in a wider dtype"
            )
        return logits


@torch.no_grad()
def _refuse_forgetful(model: Any) -> None:
    """Refuse a model whose own code loses its states where a text is given in chunks, as contexts and questions are."""
    device = next(iter(model.get_input_embeddings().parameters())).device
    ids = torch.arange(2, 14, device=device).unsqueeze(0) % model.config.get_text_config(decoder=True).vocab_size
    whole = model(ids, use_cache=False).logits[:, 6:]
    cache = DynamicCache(config=model.config)
    model(ids[:, :6], past_key_values=cache, use_cache=True)
    chunk = model(ids[:, 6:], past_key_values=cache, use_cache=True).logits
    if bool((chunk - whole).abs().max() > 0.1 * whole.abs().max()):
        raise UnsupportedModelError(
            f"{type(model).__name__} gives other predictions where a text is given in two chunks: transformers' own"
            " code of it loses its state between chunks of several tokens; measure it by a search, or ask a server"
        )


def _forgets(cache: Any) -> bool:
    """Whether a cache without its last tokens is as before they came: each layer keeps all tokens, and nothing else."""
    if isinstance(cache, KVTunerCache) and cache.window.num_tokens > 0:
        return False
    return not any(getattr(layer, "is_sliding", False) or hasattr(layer, "conv_states") for layer in cache.layers)


def until_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first of some stops."""
    return min((text.split(stop)[0] for stop in stops), key=len, default=text)
