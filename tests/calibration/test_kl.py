"""KL, agreement and likelihood, against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvtuner.calibration.forward import chain as chain_module
from kvtuner.calibration.kl import Reference, ReferenceRows, TokenScores, compare, following

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import RandomBatches

    from kvtuner.calibration.forward.chain import DecoderChain

IDS = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])


class LogitsChain:
    """A chain whose final hidden states are the logits; counts the rows that it computed."""

    vocab_size = 50

    def __init__(self, rows: int = 1000) -> None:
        self.rows = rows
        self.computed = 0

    def rows_in_flight(self) -> int:
        return self.rows

    def logits(self, final: Tensor) -> Tensor:
        self.computed += len(final)
        return final.float()


def scores_of(chain: LogitsChain | DecoderChain, reference: Tensor, other: Tensor, next_ids: Tensor) -> TokenScores:
    return compare(chain, Reference(chain, reference), other, next_ids)


def random_logits(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kl_by_hand(reference: Tensor, other: Tensor) -> Tensor:
    log_p, log_q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_scores_are_those_of_float64_however_rows_are_cut(rows: int) -> None:
    reference, other = random_logits(2, 4, 50), random_logits(2, 4, 50, seed=1)
    scores = scores_of(LogitsChain(rows), reference, other, following(IDS, 0))
    torch.testing.assert_close(scores.kl, kl_by_hand(reference, other), rtol=1e-5, atol=1e-7)
    assert torch.equal(scores.agree, (reference.argmax(-1) == other.argmax(-1)).double())
    expected = cross_entropy(other[:, :-1].flatten(0, 1).double(), IDS[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(scores.nll[:, :-1].flatten(), expected, rtol=1e-5, atol=1e-6)
    assert scores.nll[:, -1].isnan().all()
    assert {scores.kl.dtype, scores.agree.dtype, scores.nll.dtype} == {torch.float64}


def test_log_probabilities_that_are_kept_change_nothing() -> None:
    reference, other, computed, found = random_logits(2, 4, 50), random_logits(2, 4, 50, seed=1), [], []
    for limit in (2 * 4 * 50 * 4, 2 * 4 * 50 * 4 - 1, 599):
        chain = LogitsChain(3)
        exact = Reference(chain, reference, limit)
        scores = [compare(chain, exact, other, following(IDS, 0)) for _ in range(2)]
        computed.append(chain.computed)
        found += scores
    assert computed == [3 * 8, 6 + 2 * (2 + 8), 4 * 8]
    for scores in found:
        assert torch.equal(scores.kl, found[0].kl)
        assert torch.equal(scores.agree, found[0].agree)


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 700, 1024])
def test_the_most_likely_token_is_the_first_of_equals_in_every_place(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(0, 4, (400, vocab_size), generator=generator).float()  # of which many are equal
    logits[torch.arange(400), torch.randint(0, vocab_size, (400,), generator=generator)] += 2
    logits[:20, -1], logits[20:30, vocab_size // 2] = 9.0, torch.nan
    logits[30:40, vocab_size // 3 :] = torch.inf
    assert ReferenceRows.of(logits).top.tolist() == np.argmax(logits.numpy(), axis=1).tolist()


def test_a_state_does_not_diverge_from_itself() -> None:
    logits = random_logits(2, 4, 50, spread=20.0)
    scores = scores_of(LogitsChain(), logits, logits.clone(), following(IDS, 0))
    assert (scores.kl == 0).all()
    assert (scores.agree == 1).all()


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e-2, 1.0])
def test_small_divergences_do_not_drown_in_cancellation(size: float) -> None:
    reference = random_logits(1, 64, 320)
    other = reference + size * random_logits(1, 64, 320, seed=1, spread=1.0)
    scores = scores_of(LogitsChain(), reference, other, torch.zeros(1, 64, dtype=torch.int64))
    assert (scores.kl >= 0).all()
    expected = kl_by_hand(reference, other).mean()
    assert float(scores.kl.mean()) == pytest.approx(float(expected), rel=0.01)


@pytest.mark.parametrize("likely", [0.5, 90.0, 150.0])
def test_a_token_that_only_one_side_finds_likely_gives_a_finite_divergence(likely: float) -> None:
    # exp(89) is beyond float32.
    reference = torch.tensor([[[0.0, -95.0, -1.0]]])
    other = torch.tensor([[[0.0, likely, -1.0]]])
    for first, second in ((reference, other), (other, reference)):
        kl = scores_of(LogitsChain(), first, second, torch.tensor([[0]])).kl
        torch.testing.assert_close(kl, kl_by_hand(first, second), rtol=1e-5, atol=0)


def test_the_next_token_is_the_one_that_follows_the_row() -> None:
    assert following(IDS, 1).tolist() == [[7, 8, -1], [3, 4, -1]]
    assert following(IDS, 3).tolist() == [[-1], [-1]]


def test_logits_are_held_a_few_rows_at_a_time(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = chain_of("llama-gqa")
    (batch,) = random_batches(2, 20, batch_size=2)
    final = chain.trace(batch.input_ids, batch.position_ids).final
    other = final + 0.1 * random_logits(*final.shape)
    whole = scores_of(chain, final, other, following(batch.input_ids, 0))
    monkeypatch.setattr(chain_module, "LOGITS_IN_FLIGHT", 320 * 3)
    assert chain.rows_in_flight() == 3
    largest = []
    original = chain.logits
    monkeypatch.setattr(chain, "logits", lambda x: largest.append(len(x)) or original(x))
    cut = scores_of(chain, final, other, following(batch.input_ids, 0))
    assert max(largest) == 3
    torch.testing.assert_close(cut.kl, whole.kl, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(cut.nll, whole.nll, rtol=1e-5, atol=1e-6, equal_nan=True)
