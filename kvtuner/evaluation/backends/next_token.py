"""The next token's distribution as SGLang's or OpenAI's API gives it, and the KL of two such distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

LEAST_REST: Final = 1e-7
"""The least probability of all tokens without a name: what rounding leaves in single precision."""
ROUNDING: Final = 1e-3
"""The amount by which a log-probability may exceed 0."""


@dataclass(frozen=True, slots=True)
class NextToken:
    """Log-probabilities of a next token, nats: of the most likely ones, best first, and of those asked for, by id.

    The likely tokens are by text where a server names none otherwise.
    """

    top: Mapping[int | str, float]
    asked: Mapping[int, float]

    def __post_init__(self) -> None:
        for log_p in (*self.top.values(), *self.asked.values()):
            if not (math.isfinite(log_p) and log_p <= ROUNDING):
                raise ValueError(f"{log_p} is no log-probability")

    @property
    def best(self) -> int | str:
        """The most likely token."""
        return next(iter(self.top))

    def record(self) -> list[list[list[Any]]]:
        """Plain JSON, as `from_record` reads it."""
        return [[[token, log_p] for token, log_p in named.items()] for named in (self.top, self.asked)]


def from_record(record: Sequence[Sequence[tuple[Any, float]]]) -> NextToken:
    """Read what `NextToken.record` wrote."""
    top, asked = record
    return NextToken(dict(top), dict(asked))


def from_sglang(answer: Any, asked: Sequence[int]) -> NextToken:
    """Read an answer of one token to ``/generate`` with `asked` as its ``token_ids_logprob``.

    Raises:
        KeyError, IndexError, TypeError, ValueError: The answer has another form.
    """
    meta = answer["meta_info"]
    top: dict[int | str, float] = {int(token): float(log_p) for log_p, token, _ in meta["output_top_logprobs"][0]}
    named = {int(token): float(log_p) for log_p, token, _ in meta["output_token_ids_logprobs"][0]} if asked else {}
    if not top:
        raise ValueError("no log-probabilities")
    return NextToken(top, {token: named[token] for token in asked})


def from_openai(answer: Any, names_one_token: Callable[[str], bool]) -> NextToken:
    """Read an answer of one token to ``/v1/completions`` with ``logprobs``.

    A text that is not that of a single token is left out: others would be taken for it.

    Raises:
        KeyError, IndexError, TypeError, ValueError, AttributeError: The answer has another form.
    """
    named = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    top = {str(text): float(log_p) for text, log_p in named.items() if names_one_token(text)}
    if not top:
        raise ValueError("no log-probabilities of texts that are tokens")
    return NextToken(dict(sorted(top.items(), key=lambda item: -item[1])), {})


def truncated_kl(reference: NextToken, other: NextToken) -> float:
    """KL of two distributions that are known of the same few tokens, nats; all other tokens count as one.

    Merging tokens can only bring distributions closer (the data-processing inequality), so that it is a lower bound of
    the KL over the vocabulary. The tokens are the reference's most likely ones, as far as the other is known of them.
    """
    log_q = dict(other.top)
    log_q.update(other.asked.items())
    named = [token for token in reference.top if token in log_q]
    p = _parts([reference.top[token] for token in named])
    q = _parts([log_q[token] for token in named])
    difference = q - p
    # As `calibration.kl.compare`: no term is negative, and small ones do not cancel.
    near = np.exp(p) * (np.expm1(np.minimum(difference, 1.0)) - difference)
    terms = np.where(difference < 1.0, near, np.exp(q) - np.exp(p) * (1 + difference))
    return float(terms.sum())


def _parts(log_p: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Log-probabilities of tokens and of all others together, [tokens + 1]."""
    named = np.array(log_p, dtype=np.float64)
    return np.append(named, math.log(max(1.0 - float(np.exp(named).sum()), LEAST_REST)))
