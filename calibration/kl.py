"""KL, agreement and likelihood of one set of final hidden states against another. Knows nothing of quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtuner.calibration.forward.chain import DecoderChain

KEPT_BYTES = 1 << 27  # log-probabilities of all references of a split: enough for a small vocabulary alone


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The scores of each scored token, float64 [batch, scored tokens].

    Attributes:
        kl: KL(reference || other) of the next-token distribution, nats.
        agree: 1 where both put the same token first.
        nll: -log p(next token) under the other, nats; the last token of a sequence has none (NaN).
    """

    kl: Tensor
    agree: Tensor
    nll: Tensor


class Reference:
    """The exact final hidden states that others are compared with."""

    @torch.no_grad()
    def __init__(self, chain: DecoderChain, final: Tensor, limit: int = 0) -> None:
        """Take final hidden states, [batch, tokens, hidden_size].

        Their log-probabilities are kept if they take no more than `limit` bytes, else computed for each comparison.
        """
        self.final = final
        self._chain = chain
        is_small = 4 * final.shape[0] * final.shape[1] * chain.vocab_size <= limit
        self._kept = list(self._compute()) if is_small else None

    def blocks(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Log-probabilities [rows, vocab_size], float32, and most likely tokens [rows], of a few rows at a time."""
        return self._compute() if self._kept is None else self._kept

    def _compute(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in self.final.flatten(0, 1).split(self._chain.rows_in_flight()):
            log_p = self._chain.logits(rows).log_softmax(dim=-1)
            yield log_p, log_p.argmax(dim=-1)


@torch.no_grad()
def compare(chain: DecoderChain, reference: Reference, other: Tensor, next_ids: Tensor) -> TokenScores:
    """Compare final hidden states [batch, tokens, hidden_size] by token, holding the logits of a few rows at a time.

    The divergence is summed as ``p * (exp(d) - 1 - d)`` with ``d = log q - log p``: every term is non-negative, so that
    the tiny values of 8-bit caches do not drown in cancellation. Where d is large, ``p * exp(d)`` is taken as q: exp
    would overflow on a token that only the other model finds likely.

    `next_ids` [batch, tokens] holds the token that follows each row; -1 where none does.
    """
    shape = other.shape[:2]
    kl, agree, nll = [], [], []
    rows = zip(
        reference.blocks(),
        other.flatten(0, 1).split(chain.rows_in_flight()),
        next_ids.flatten().split(chain.rows_in_flight()),
        strict=True,
    )
    for (log_p, top), other_rows, targets in rows:  # [rows, vocab_size], [rows]; [rows, hidden_size]; [rows]
        log_q = chain.logits(other_rows).log_softmax(dim=-1)
        difference = log_q - log_p
        p = log_p.exp()
        near = p * (torch.expm1(difference) - difference)
        terms = torch.where(difference < 1.0, near, log_q.exp() - p - p * difference)
        kl.append(terms.sum(dim=-1, dtype=torch.float64))
        agree.append((top == log_q.argmax(dim=-1)).double())
        targets = targets.to(log_q.device)
        picked = log_q.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1).double()
        nll.append(torch.where(targets >= 0, -picked, torch.nan))
    return TokenScores(*(torch.cat(parts).cpu().reshape(shape) for parts in (kl, agree, nll)))


def following(input_ids: Tensor, start: int) -> Tensor:
    """The token after each of the tokens from `start` on, -1 after the last; [batch, tokens - start]."""
    shifted = torch.nn.functional.pad(input_ids[:, 1:], (0, 1), value=-1)
    return shifted[:, start:]
