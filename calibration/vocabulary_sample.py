"""A sample of a large vocabulary, over which a batch's KL is estimated. Knows nothing of what is compared.

Comparing all logits of a model with 128k tokens in its vocabulary costs more than a short run of its layers. Decisions
need a KL to a few percent alone; what is reported of a profile is compared over all tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kvtuner.calibration.row_sample import draw_by_importance

if TYPE_CHECKING:
    from torch import Tensor

    from kvtuner.calibration.forward.chain import DecoderChain
    from kvtuner.calibration.kl import LogitSource

WHOLE_UP_TO: Final = 1 << 15
"""The largest vocabulary of which all tokens are compared."""
SAMPLED_TOKENS: Final = 1 << 14
"""The tokens that are drawn of a larger one."""


class VocabularySample:
    """Some tokens of a vocabulary, with a weight each, that stand for all of it in one batch.

    The logarithm of its weight is added to a token's logit, so that sums of exponentials over the sample are without
    bias those over the vocabulary, and a divergence over the sample estimates the one over the vocabulary. Chances
    are in proportion to the root mean square of a token's probability over the rows of the batch, which makes the
    variance of the mean divergence least for a given size (Neyman, 1934): what is likely somewhere is in it for
    certain.
    """

    @torch.no_grad()
    def __init__(self, chain: DecoderChain, final: Tensor, seed: int) -> None:
        """Draw tokens for the exact final hidden states of a batch, [batch, tokens, hidden_size]."""
        squares = torch.zeros(chain.vocab_size, dtype=torch.float64)
        for rows in final.flatten(0, 1).split(chain.rows_in_flight()):
            p = chain.logits(rows).softmax(dim=-1)
            squares += p.square_().sum(dim=0).cpu()
        tokens, weights = draw_by_importance(squares.sqrt(), SAMPLED_TOKENS, torch.Generator().manual_seed(seed))
        self._chain = chain
        self._tokens = tokens.to(chain.logits_device)
        self._log_weights = weights.log().to(chain.logits_device)

    @property
    def vocab_size(self) -> int:
        """Logits per token."""
        return len(self._tokens)

    def rows_in_flight(self) -> int:
        """Token rows whose logits are held at a time."""
        return self._chain.rows_in_flight()

    def logits(self, final: Tensor) -> Tensor:
        """Logits of the drawn tokens with the logarithms of their weights, float32 [rows, vocab_size]."""
        return self._chain.logits(final, self._tokens).add_(self._log_weights)


def logits_to_compare(chain: DecoderChain, final: Tensor, seed: int) -> LogitSource:
    """The logits over which runs of a batch are compared to decide between them.

    Those of the whole vocabulary where it is small or its head is no plain matrix, else of a sample that is drawn for
    the exact final hidden states [batch, tokens, hidden_size].
    """
    if chain.vocab_size <= WHOLE_UP_TO or not chain.has_rows_of_tokens:
        return chain
    return VocabularySample(chain, final, seed)
