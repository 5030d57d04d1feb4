"""KL, agreement and likelihood of one set of final hidden states against another. Knows nothing of quantization."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KEPT_BYTES: Final = 1 << 28  # logits of all references of a split
CACHED_LOGITS: Final = 1 << 17  # logits that a core's cache holds with their temporaries
SEARCHED_BLOCK: Final = 256  # logits whose largest is found before its place
LARGEST_EXPONENT: Final = 30.0  # exp of it, times float32's rounding of a probability, is still next to nothing


class LogitSource(Protocol):
    """The head of a model, or a part of it."""

    @property
    def vocab_size(self) -> int:
        """Logits per token."""

    def rows_in_flight(self) -> int:
        """Token rows whose logits are held at a time."""

    def logits(self, final: Tensor, /) -> Tensor:
        """Logits of final hidden states [rows, hidden_size], float32 [rows, vocab_size]."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The scores of each scored token, float64 [num_sequences, scored tokens].

    Sequences with images may have fewer scored tokens than others: zeros fill their rows of KL and agreement.

    Attributes:
        kl: KL(reference || other) of the next-token distribution, nats.
        agree: 1 where both put the same token first.
        nll: -log p(next token) under the other, nats; the last token of a sequence has none (NaN).
        counts: The scored tokens of each sequence, int64 [num_sequences].
    """

    kl: Tensor
    agree: Tensor
    nll: Tensor
    counts: Tensor

    @classmethod
    def joined(cls, parts: Sequence[TokenScores]) -> TokenScores:
        """The scores of several batches."""
        longest = max(part.kl.shape[1] for part in parts)

        def column(name: str, filling: float) -> Tensor:
            rows = (getattr(part, name) for part in parts)
            return torch.cat([pad(row, (0, longest - row.shape[1]), value=filling) for row in rows])

        counts = torch.cat([part.counts for part in parts])
        return cls(column("kl", 0.0), column("agree", 0.0), column("nll", torch.nan), counts)

    def split(self, sizes: Sequence[int]) -> list[TokenScores]:
        """The scores of batches of so many sequences each, as they were before `joined`."""
        parts = []
        for rows in torch.arange(len(self.counts)).split(list(sizes)):
            longest = int(self.counts[rows].max())
            kl, agree, nll = (column[rows, :longest] for column in (self.kl, self.agree, self.nll))
            parts.append(TokenScores(kl, agree, nll, self.counts[rows]))
        return parts

    @classmethod
    def of_kl(cls, kl: Tensor) -> TokenScores:
        """Scores that have a KL alone, of sequences with as many scored tokens each."""
        none = torch.full_like(kl, torch.nan)
        return cls(kl, none, none, torch.full((len(kl),), kl.shape[1]))

    @property
    def mean_kl(self) -> Tensor:
        """The mean KL of each sequence's scored tokens, [num_sequences]."""
        return self.kl.sum(dim=1) / self.counts

    def scored_kl(self) -> Tensor:
        """The KL of all scored tokens of all sequences, [tokens]."""
        return self.kl[torch.arange(self.kl.shape[1]) < self.counts.unsqueeze(-1)]


@dataclass(frozen=True, slots=True)
class ReferenceRows:
    """The logits of a few rows of a reference.

    Attributes:
        logits: float32 [rows, vocab_size].
        log_sum: The logarithm of the sum of their exponentials, float32 [rows, 1].
        top: The most likely tokens, [rows].
    """

    logits: Tensor
    log_sum: Tensor
    top: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> ReferenceRows:
        """The rows of logits, float32 [rows, vocab_size]."""
        return cls(logits, logits.logsumexp(dim=-1, keepdim=True), _first_of_largest(logits))

    def split(self, rows: int) -> Iterator[ReferenceRows]:
        """Parts of so many rows each."""
        parts = zip(self.logits.split(rows), self.log_sum.split(rows), self.top.split(rows), strict=True)
        return (ReferenceRows(*part) for part in parts)


class Reference:
    """The exact final hidden states that others are compared with."""

    @torch.no_grad()
    def __init__(self, head: LogitSource, final: Tensor, limit: int = 0) -> None:
        """Take final hidden states, [batch, tokens, hidden_size].

        The logits of the first rows are kept, which take no more than `limit` bytes, and those of others computed for
        each comparison.
        """
        self.final = final
        self._head = head
        self._rows = final.flatten(0, 1).split(head.rows_in_flight())
        sizes = accumulate(4 * len(rows) * head.vocab_size for rows in self._rows)
        self._kept = [self._compute(rows) for rows, size in zip(self._rows, sizes, strict=True) if size <= limit]

    def blocks(self) -> Iterator[ReferenceRows]:
        """All rows, a few at a time."""
        yield from self._kept
        yield from map(self._compute, self._rows[len(self._kept) :])

    def _compute(self, rows: Tensor) -> ReferenceRows:
        return ReferenceRows.of(self._head.logits(rows))


@torch.no_grad()
def compare(head: LogitSource, reference: Reference, other: Tensor, next_ids: Tensor) -> TokenScores:
    """Compare final hidden states [batch, tokens, hidden_size] by token, holding the logits of a few rows at a time.

    `next_ids` [batch, tokens] holds the token that follows each row; -1 where none does.
    """
    kl, agree, nll = [], [], []
    first = 0
    next_ids = next_ids.flatten()
    for exact, logits in _rows_of_both(head, reference, other):
        targets = next_ids[first : first + len(logits)].to(logits.device)
        first += len(logits)
        row_kl, log_sum = _divergence(exact, logits)
        kl.append(row_kl)
        agree.append((exact.top == _first_of_largest(logits)).double())
        picked = logits.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1).double()
        nll.append(torch.where(targets >= 0, log_sum - picked, torch.nan))
    kls, agreements, nlls = (torch.cat(parts).cpu().reshape(other.shape[:2]) for parts in (kl, agree, nll))
    return TokenScores(kls, agreements, nlls, torch.full((other.shape[0],), other.shape[1]))


@torch.no_grad()
def divergence(head: LogitSource, reference: Reference, other: Tensor) -> Tensor:
    """The KL alone of final hidden states [batch, tokens, hidden_size], as `compare` has it."""
    parts = [_divergence(exact, logits)[0] for exact, logits in _rows_of_both(head, reference, other)]
    return torch.cat(parts).cpu().reshape(other.shape[:2])


def _rows_of_both(head: LogitSource, reference: Reference, other: Tensor) -> Iterator[tuple[ReferenceRows, Tensor]]:
    """The reference's rows and the other's logits of as many rows as a core's cache holds."""
    for block, rows in zip(reference.blocks(), other.flatten(0, 1).split(head.rows_in_flight()), strict=True):
        logits = block.logits if other is reference.final else head.logits(rows)
        step = len(logits) if logits.device.type != "cpu" else max(1, CACHED_LOGITS // head.vocab_size)
        yield from zip(block.split(step), logits.split(step), strict=True)


def _divergence(reference: ReferenceRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """KL(reference || other), nats, and the logarithm of the sum of the other's exponentials, float64 [rows].

    With p the reference's probabilities and d how far the other's logits, float32 [rows, vocab_size], are from its
    logits, the divergence is ``log E_p[exp(d - E_p[d])] = log(1 + E_p[exp(y) - 1 - y])`` with ``y = d - E_p[d]``: every
    term is non-negative, so that the tiny values of 8-bit caches do not drown in cancellation.
    """
    p = (reference.logits - reference.log_sum).exp_()
    total = p.sum(dim=-1, keepdim=True)  # 1 to rounding
    y = logits - reference.logits
    mean = torch.mul(p, y).sum(dim=-1, keepdim=True) / total
    y -= mean
    if not bool(y.max() < LARGEST_EXPONENT):  # a token that only the other finds likely, or NaN
        p, y = (reference.logits.double() - reference.log_sum.double()).exp_(), y.double()
        total = p.sum(dim=-1, keepdim=True)
    excess = torch.expm1(y).sub_(y).mul_(p).sum(dim=-1, keepdim=True) / total
    kl = excess.double().log1p()
    return kl.squeeze(-1), (reference.log_sum.double() + mean + kl).squeeze(-1)


def _first_of_largest(logits: Tensor) -> Tensor:
    """The first token of the largest logit in each row, as argmax has it, or of the first NaN.

    The largest of each block is found without its place, which takes a fourteenth of the time on a processor.
    """
    vocab_size = logits.shape[-1]
    whole = vocab_size // SEARCHED_BLOCK * SEARCHED_BLOCK
    if whole == 0 or logits.device.type != "cpu":
        return logits.max(dim=-1).indices  # as argmax, in a third of its time
    largest = logits[:, :whole].unflatten(-1, (-1, SEARCHED_BLOCK)).amax(dim=-1)
    if whole < vocab_size:
        largest = torch.cat((largest, logits[:, whole:].amax(dim=-1, keepdim=True)), dim=-1)
    start = SEARCHED_BLOCK * largest.max(dim=-1, keepdim=True).indices
    tokens = (start + torch.arange(SEARCHED_BLOCK)).clamp(max=vocab_size - 1)
    place = logits.gather(-1, tokens).max(dim=-1, keepdim=True).indices
    first: Tensor = tokens.gather(-1, place).squeeze(-1)
    return first


def following(input_ids: Tensor, start: int) -> Tensor:
    """The token after each of the tokens from `start` on, -1 after the last; [batch, tokens - start]."""
    shifted = pad(input_ids[:, 1:], (0, 1), value=-1)
    return shifted[:, start:]
