"""What transformers predicts of a server's tokens, with a profile's cache and without. Knows nothing of servers."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoModelForCausalLM

from kvtuner.runtime_loader.transformers_cache import KVTunerCache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from kvtuner.exported_configs.profile.profile import Profile

OWN_SHARE: Final = 0.02
"""The largest divergence of a server from the host, as a share of the profile's own from the unquantized model."""
ROUNDING: Final = 3.0
"""The allowance for the served dtype, in divergences that rounding to it makes on the host.

The demo model's is in bf16 between a tenth and all of what 3 bits do to it: tokens read from a wrong place are found,
scales that are slightly off are left to the checks of kernels.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer to a prompt, of which the first tokens were found in its cache.

    Attributes:
        prompt: The tokens that were asked.
        tokens: The tokens that were answered.
        logprobs: The server's predictions of these, float64 [tokens, vocabulary].
        cached: The tokens of the prompt that were read from the cache.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: Tensor
    cached: int

    @classmethod
    def of(cls, prompt: list[int], answered: Any, vocab_size: int) -> Answer:
        """Read what SGLang answers, which must have a log-probability of every token of the vocabulary."""
        meta = answered["meta_info"]
        logprobs = torch.full((len(answered["output_ids"]), vocab_size), torch.nan, dtype=torch.float64)
        for position, top in enumerate(meta["output_top_logprobs"]):
            logprobs[position, [token for _, token, _ in top]] = torch.tensor([p for p, _, _ in top]).double()
        return cls(prompt, list(answered["output_ids"]), logprobs, int(meta["cached_tokens"]))


@dataclass(frozen=True, slots=True)
class Divergence:
    """The mean KL, in nats per token: of the server from the host, of the profile, and of rounding to its dtype."""

    server: float
    own: float
    rounding: float

    @property
    def limit(self) -> float:
        """The largest KL of a server that reads what it should."""
        return OWN_SHARE * self.own + ROUNDING * self.rounding + 1e-6


class Host:
    """The transformers host of a folder's model and a profile; of another dtype than float32 it also has that."""

    def __init__(self, folder: Path, profile: Profile, dtype: torch.dtype) -> None:
        self.profile = profile
        self._models = {
            each: AutoModelForCausalLM.from_pretrained(folder, dtype=each).eval() for each in {torch.float32, dtype}
        }
        self._dtype = dtype

    @property
    def vocab_size(self) -> int:
        """The model's vocabulary."""
        return int(self._models[torch.float32].config.vocab_size)

    def divergence(self, answers: Sequence[Answer]) -> Divergence:
        """How far a server's predictions lie from the host's of the same tokens; NaN where some are missing."""
        found = torch.cat([answer.logprobs for answer in answers])
        wanted, exact = (
            torch.cat([self._predictions(answer, torch.float32, quantized=quantized) for answer in answers])
            for quantized in (True, False)
        )
        rounding = 0.0
        if self._dtype != torch.float32:
            rounded = torch.cat([self._predictions(answer, self._dtype, quantized=True) for answer in answers])
            rounding = _kl(wanted, rounded)
        return Divergence(_kl(wanted, found), _kl(exact, wanted), rounding)

    @torch.no_grad()
    def _predictions(self, answer: Answer, dtype: torch.dtype, *, quantized: bool) -> Tensor:
        model = self._models[dtype]
        cache = KVTunerCache.from_profile(self.profile, model.config, allow_derived=True) if quantized else None
        ids = torch.tensor([answer.prompt])
        # What a hit finds was one chunk once, which read itself exactly; so does the rest, and the hit as stored.
        pieces = ids.tensor_split([answer.cached], dim=1) if answer.cached else (ids,)
        with ExitStack() as chunks:
            if cache is not None and answer.cached:
                chunks.enter_context(cache.reading("hit"))
                chunks.enter_context(cache.attending(model, in_place=False))
            for piece in pieces:
                output = model(piece, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
        rows = [output]
        for token in answer.tokens[:-1]:
            rows.append(model(torch.tensor([[token]]), past_key_values=cache, use_cache=True))
        return torch.stack([row.logits[0, -1] for row in rows]).double().log_softmax(-1)


def _kl(p: Tensor, q: Tensor) -> float:
    """The mean KL of distributions from others, by their log-probabilities [tokens, vocabulary]."""
    return (p.exp() * (p - q)).sum(-1).mean().item()
