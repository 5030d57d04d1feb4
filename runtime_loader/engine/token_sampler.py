"""The choice of tokens by each request's own parameters, with transformers' logits processors. Knows no models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvtuner.runtime_loader.engine.generation import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.engine.generation import Generation, SamplingParameters


class AnswerPenalty(LogitsProcessor):
    """The presence and frequency penalties of an answer, which transformers lacks, as OpenAI's interface has them."""

    def __init__(self, presence: float, frequency: float, num_prompt: int) -> None:
        self._presence, self._frequency, self._num_prompt = presence, frequency, num_prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Lower the logits [1, vocab_size] of tokens behind the prompt of input_ids [1, tokens]."""
        counts = torch.zeros_like(scores).scatter_add_(
            1, input_ids[:, self._num_prompt :], torch.ones_like(input_ids[:, self._num_prompt :], dtype=scores.dtype)
        )
        return scores - self._presence * (counts > 0) - self._frequency * counts


def processors(sampling: SamplingParameters, num_prompt: int) -> LogitsProcessorList:
    """The processors of a request, in the order of transformers' generate."""
    steps: list[Any] = []
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.presence_penalty or sampling.frequency_penalty:
        steps.append(AnswerPenalty(sampling.presence_penalty, sampling.frequency_penalty, num_prompt))
    if sampling.temperature > 0:
        if sampling.temperature != 1:
            steps.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            steps.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            steps.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0:
            steps.append(MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList(steps)


def generator_of(sampling: SamplingParameters, device: torch.device) -> torch.Generator | None:
    """The generator of a request that samples, seeded by it or anew; a greedy one needs none."""
    if sampling.temperature == 0:
        return None
    generator = torch.Generator(device)
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


def likeliest_tokens(logits: Tensor) -> tuple[list[float], list[int]]:
    """The highest logit of each row of [tokens, vocab_size], NaN where any is, and the first token that has it.

    Logits are float32, in inference mode or without a gradient: NumPy reads no bfloat16 and no tensor that needs one.
    """
    if logits.device.type == "cpu":  # in a tenth of the time of torch, which takes one number after the other
        rows = logits.numpy()
        tokens = rows.argmax(-1).tolist()
        return [rows.item(place) for place in enumerate(tokens)], tokens
    highest, likeliest = logits.max(-1)
    return highest.tolist(), likeliest.tolist()


def sample(generation: Generation, logits: Tensor) -> int:
    """The next token of a request, of its logits [1, vocab_size], float32."""
    steps = processors(generation.sampling, generation.num_prompt)
    ids = torch.tensor([generation.tokens], device=logits.device)
    scores: Tensor = steps(ids, logits.clone())  # type: ignore[arg-type]  # legacy tensor types
    if generation.generator is None:
        return int(scores.argmax())
    return int(torch.multinomial(scores.softmax(-1), 1, generator=generation.generator))


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """The log-probabilities of tokens, each by its row of logits [tokens, vocab_size], and of the likeliest ones."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(tokens, device=logits.device).unsqueeze(-1)).flatten().tolist()
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    rows = zip(tokens, chosen, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True))) for token, logprob, ids, values in rows
    ]  # fmt: skip
