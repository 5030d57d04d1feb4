"""An engine: requests in, tokens out, a step at a time, on the thread that calls it. Knows no files or servers."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from kvtuner.errors import RequestError
from kvtuner.geometry import ModelGeometry
from kvtuner.runtime_loader.engine.batch_scheduler import BatchScheduler, EngineState
from kvtuner.runtime_loader.engine.engine_options import EngineOptions
from kvtuner.runtime_loader.engine.generation import Completion, Delta, Generation, SamplingParameters, TokenLogprob
from kvtuner.runtime_loader.engine.model_runner import ModelRunner
from kvtuner.runtime_loader.engine.page_allocator import PageAllocator
from kvtuner.runtime_loader.engine.paged_pool import PagedPool
from kvtuner.runtime_loader.engine.prefix_tree import PrefixTree
from kvtuner.runtime_loader.engine.served_model import context_length_of, device_of, ends_of, pool_shape_of, tokens_of
from kvtuner.runtime_loader.engine.step_attention import choose_attention
from kvtuner.runtime_loader.engine.step_batch import StepBatch, kept_tokens
from kvtuner.runtime_loader.engine.text_stream import KeptTexts, TextStream
from kvtuner.runtime_loader.engine.token_sampler import generator_of, likeliest_tokens, sample, token_logprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.runtime_loader.engine.generation import FinishReason

    AskedPrompt = str | Sequence[int]

GREEDY_SAMPLING = SamplingParameters()


class LocalEngine:
    """A loaded transformers model that answers many requests at a time, by a profile's rows or unquantized ones.

    The model's attention is the engine's until `close`, or the end of a ``with`` block; nobody else may run the model
    meanwhile.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, profile: Profile | None = None, **options: Any
    ) -> None:
        """Prepare a model; `options` are fields of `EngineOptions`.

        Without a tokenizer prompts and answers are tokens.

        Raises:
            UnsupportedModelError: A model without a cache of the supported kind, or on several devices.
            ProfileError: A profile of another model.
            ServingError: An attention that cannot run here, pages that cut groups of keys, or too little KV memory.
        """
        self.options = EngineOptions(**options)
        self.model, self.tokenizer, self.profile = model, tokenizer, profile
        self.context_length = context_length_of(model, self.options)
        shape = pool_shape_of(model, profile, self.context_length, self.options)
        self.pool = PagedPool(shape, shape.num_pages(self.options.kv_memory), device_of(model))
        self._attention = choose_attention(
            self.options, self.pool, ModelGeometry.from_config(model.config).num_attention_heads
        )  # fmt: skip
        self.allocator = PageAllocator(self.pool.num_pages)
        self.prefix_tree = PrefixTree.of(self.options, self.allocator, shape.page_size)
        self._scheduler = BatchScheduler(self.options, self.pool, self.allocator, self.prefix_tree)
        self._runner = ModelRunner(model, self.pool, self._attention)
        self._ends = ends_of(model, tokenizer)
        self._generations: dict[str, Generation] = {}
        self._numbers = itertools.count()
        self._texts: KeptTexts = {}
        self._num_steps = self._num_prompt_tokens = self._num_answer_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the model back with the attention that it had; idempotent."""
        self._runner.close()

    @property
    def attention(self) -> str:
        """The name of the implementation of attention."""
        return self._attention.name

    @property
    def has_requests(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_requests

    @property
    def state(self) -> EngineState:
        """The counts of the engine now."""
        return EngineState(
            len(self._scheduler.running),
            len(self._scheduler.waiting),
            self.allocator.num_pages,
            self.allocator.num_free,
            self.allocator.num_idle,
            self._num_steps,
            self._num_prompt_tokens,
            self._scheduler.num_cached_tokens,
            self._num_answer_tokens,
            self._scheduler.num_retracted,
        )

    def generate(
        self,
        prompts: AskedPrompt | Sequence[AskedPrompt],
        sampling: SamplingParameters | Sequence[SamplingParameters] = GREEDY_SAMPLING,
    ) -> list[Completion]:
        """Answer prompts, texts or tokens, by one set of parameters or one for each; answers come in their order."""
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [cast("AskedPrompt", prompts)]
        asked = cast("Sequence[AskedPrompt]", prompts)
        each = [sampling] * len(asked) if isinstance(sampling, SamplingParameters) else list(sampling)
        if len(each) != len(asked):
            raise RequestError(f"{len(asked)} prompts were given {len(each)} sets of parameters; give one, or as many")
        with self._aborting_on_error():
            ids = [self.submit(prompt, own) for prompt, own in zip(asked, each, strict=True)]
            wanted = {request_id: self._generations[request_id] for request_id in ids}
            while any(generation.finish_reason is None for generation in wanted.values()):
                self.step()
        return [generation.completion() for generation in wanted.values()]

    def stream(self, prompt: AskedPrompt, sampling: SamplingParameters = GREEDY_SAMPLING) -> Iterator[Delta]:
        """Answer one prompt as its tokens come; what is left when the caller goes away is aborted."""
        with self._aborting_on_error():
            request_id = self.submit(prompt, sampling)
            generation = self._generations[request_id]
            try:
                while generation.finish_reason is None:
                    yield from (delta for delta in self.step() if delta.request_id == request_id)
            finally:
                self.abort(request_id)

    def submit(
        self, prompt: AskedPrompt, sampling: SamplingParameters = GREEDY_SAMPLING, *, request_id: str | None = None
    ) -> str:
        """Let a request wait for its turn; returns its id.

        Raises:
            RequestError: It is empty, too long, or asks for text without a tokenizer, or its id is in use.
        """
        generation = self._generation(self.tokens_of(prompt), sampling, request_id)
        self._scheduler.submit(generation)
        self._generations[generation.request_id] = generation
        return generation.request_id

    def submit_branches(
        self,
        prompt: AskedPrompt,
        branches: Sequence[Sequence[int]],
        sampling: SamplingParameters = GREEDY_SAMPLING,
        *,
        first_position: int = 0,
    ) -> list[str]:
        """Submit requests that begin alike; returns their ids.

        The beginning is one chunk, computed once and shared with its exact copies; what follows it, if anything, is
        another chunk of each. The prefix cache takes no part.

        Raises:
            RequestError: As `submit`; or log-probabilities of the prompt are asked of several.
        """
        beginning, group = self.tokens_of(prompt), []
        if len(branches) > 1 and sampling.prompt_logprobs is not None:
            raise RequestError("log-probabilities of the prompt are told of one branch; ask for each by itself")
        for branch in branches:
            tokens = beginning + (self.tokens_of(branch) if branch else [])
            group.append(self._generation(tokens, sampling, None, first_position))
            group[-1].split = len(beginning)
        group[0].branches = group[1:]
        self._scheduler.submit(group[0])
        self._generations |= {generation.request_id: generation for generation in group}
        return [generation.request_id for generation in group]

    def _generation(
        self, tokens: list[int], sampling: SamplingParameters, request_id: str | None, first_position: int = 0
    ) -> Generation:
        number = next(self._numbers)
        request_id = request_id or f"request-{number}"
        if request_id in self._generations:
            raise RequestError(f"there is a request {request_id!r} already; give another id")
        if sampling.stop and self.tokenizer is None:
            raise RequestError("a text to stop at needs a tokenizer; give tokens to stop at")
        room = self.context_length - first_position - len(tokens)
        num_asked = 1 if sampling.max_tokens is None else sampling.max_tokens
        if room < num_asked:
            raise RequestError(
                f"{len(tokens)} tokens and an answer of {num_asked} are more than the context of"
                f" {self.context_length}; give a shorter prompt, or ask for fewer"
            )
        return Generation(
            request_id,
            number,
            tokens,
            len(tokens),
            len(tokens) + (room if sampling.max_tokens is None else num_asked),
            sampling,
            first_position=first_position,
            text=None if self.tokenizer is None else TextStream(self.tokenizer, sampling, self._texts),
            generator=generator_of(sampling, self.pool.device),
        )

    def generation(self, request_id: str) -> Generation:
        """The request of an id, while it is not finished."""
        return self._generations[request_id]

    def tokens_of(self, prompt: AskedPrompt) -> list[int]:
        """The tokens of a prompt.

        Raises:
            RequestError: There are none, one is outside of the vocabulary, or there is no tokenizer for text.
        """
        return tokens_of(prompt, self.model, self.tokenizer)

    def abort(self, request_id: str) -> Delta | None:
        """End a request, whose pages are free at once; None if it is finished already."""
        generation = self._generations.get(request_id)
        return None if generation is None else self._finish(generation, "abort")

    def pin(self, prompt: AskedPrompt) -> int:
        """Compute a beginning that many prompts share, and keep it from eviction; returns its tokens, in whole pages.

        Raises:
            RequestError: There is no prefix cache, or no room beside requests.
        """
        self.generate([self.tokens_of(prompt)], SamplingParameters(max_tokens=1))
        return self._scheduler.pin(self.tokens_of(prompt))

    def unpin_all(self) -> None:
        """Leave all that is pinned to eviction again."""
        self._scheduler.unpin_all()

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Run one forward of what is due, and return what it added to answers."""
        scheduled = self._scheduler.schedule()
        if not scheduled:
            return []
        kept, rows = kept_tokens(scheduled)
        reads_pages = self._attention.reads_pages
        step = StepBatch.of(self.pool, scheduled, kept, self.options.attend, with_pages=reads_pages)
        logits = self._runner.run(step)
        self._num_steps += 1
        due, deltas = [], []
        for (generation, new), of_kept in zip(scheduled, rows, strict=True):
            if not generation.decodes:
                self._num_prompt_tokens += new
                self._note_prompt(generation, new, logits[of_kept])
            self._scheduler.stored(generation, new)
            if generation.num_missing:
                continue
            if len(generation.tokens) == generation.most_tokens:
                deltas.append(self._finish(generation, "length"))
            else:
                due.append((generation, of_kept.stop - 1))
        return deltas + self._answer(due, logits)

    def _note_prompt(self, generation: Generation, num_new: int, logits: Tensor) -> None:
        """Note the log-probabilities of the prompt's tokens that follow those of a chunk."""
        asked = generation.sampling.prompt_logprobs
        if asked is None:
            return
        # A request that was retracted computes again what is noted already.
        first, start = len(generation.prompt_logprobs) + 1, generation.num_stored + 1
        targets = generation.tokens[first : min(start + num_new, generation.num_prompt)]
        if targets:
            generation.prompt_logprobs += token_logprobs(logits[first - start :][: len(targets)], targets, asked)

    def _answer(self, due: list[tuple[Generation, int]], logits: Tensor) -> list[Delta]:
        """Choose the next token of requests by their rows of logits."""
        if not due:
            return []
        generations = [generation for generation, _ in due]
        if len(due) < len(logits):
            logits = logits[[row for _, row in due]]
        deltas = []
        for row, (generation, logit, token) in enumerate(zip(generations, *likeliest_tokens(logits), strict=True)):
            if not isfinite(logit):
                generation.error = "the model gives NaN or infinity; run it in a wider dtype"
                deltas.append(self._finish(generation, "error"))
                continue
            sampling = generation.sampling
            if not sampling.is_plain:
                token = sample(generation, logits[row : row + 1])
            if sampling.logprobs is not None:
                generation.logprobs += token_logprobs(logits[row : row + 1], [token], sampling.logprobs)
            self._num_answer_tokens += 1
            deltas.append(self._push(generation, token))
        return deltas

    def _push(self, generation: Generation, token: int) -> Delta:
        """Add a token to an answer, which may end by it."""
        sampling, stream = generation.sampling, generation.text
        generation.tokens.append(token)
        logprobs = tuple(generation.logprobs[-1:])
        is_end = token in sampling.stop_token_ids or (token in self._ends and not sampling.ignore_eos)
        # The text of what ends an answer is no part of it.
        text = "" if stream is None or is_end else stream.push(token)
        if is_end or (stream is not None and stream.stopped_at is not None):
            generation.stop_text = token if is_end or stream is None else stream.stopped_at
            return self._finish(generation, "stop", text, (token,), logprobs)
        if len(generation.tokens) == generation.most_tokens:
            return self._finish(generation, "length", text, (token,), logprobs)
        return Delta(generation.request_id, text, (token,), logprobs)

    def _finish(
        self,
        generation: Generation,
        reason: FinishReason,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Delta:
        generation.finish_reason = reason
        self._scheduler.finish(generation)
        del self._generations[generation.request_id]
        held = "" if generation.text is None else generation.text.flush()
        return Delta(generation.request_id, text + held, token_ids, logprobs, reason, generation.error)

    @contextmanager
    def _aborting_on_error(self) -> Iterator[None]:
        """Abort requests that a caller would not get answers of any more."""
        before = set(self._generations)
        try:
            yield
        except BaseException:
            for request_id in self._generations.keys() - before:
                self.abort(request_id)
            raise
