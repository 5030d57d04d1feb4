"""A sample of a large vocabulary: its divergence against the one over all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from kvtuner.calibration import vocabulary_sample as sample_module
from kvtuner.calibration.kl import Reference, divergence
from kvtuner.calibration.vocabulary_sample import SAMPLED_TOKENS, VocabularySample, logits_to_compare

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import RandomBatches

    from kvtuner.calibration.forward.chain import DecoderChain

VOCABULARY, WIDTH, ROWS = 131072, 32, 128


class PlainHead:
    """A chain that is nothing but a matrix."""

    vocab_size = VOCABULARY
    has_rows_of_tokens = True
    logits_device = torch.device("cpu")

    def __init__(self, spread: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = spread / WIDTH**0.5 * torch.randn(VOCABULARY, WIDTH, generator=generator)

    def rows_in_flight(self) -> int:
        return 16

    def logits(self, final: Tensor, tokens: Tensor | None = None) -> Tensor:
        return final @ (self.weight if tokens is None else self.weight[tokens]).T


def states(seed: int) -> Tensor:
    return torch.randn(1, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])  # all tokens alike, as in real models, one token has nearly all
@pytest.mark.parametrize("size", [0.003, 0.1, 0.5])
def test_the_divergence_of_a_sample_is_that_of_the_vocabulary_to_a_few_percent(spread: float, size: float) -> None:
    head, final = PlainHead(spread), states(2)
    other = final + size * states(3)
    whole = divergence(head, Reference(head, final), other)
    for seed in range(2):
        sample = VocabularySample(head, final, seed)
        assert sample.vocab_size <= SAMPLED_TOKENS
        found = divergence(sample, Reference(sample, final), other)
        assert float(found.mean()) == pytest.approx(float(whole.mean()), rel=0.02)
        # Rows of next to no divergence may be far off, since they do not count in a mean.
        assert float((found - whole).square().mean().sqrt() / whole.mean()) < 0.1


def test_two_runs_that_differ_by_a_tenth_keep_their_order() -> None:
    head, final = PlainHead(2.0), states(2)
    sample = VocabularySample(head, final, 0)
    reference = Reference(sample, final)
    sizes = [0.1, 0.105, 0.11, 0.116]  # each KL a tenth larger
    found = [float(divergence(sample, reference, final + size * states(4)).mean()) for size in sizes]
    assert found == sorted(found)
    assert found[1] / found[0] == pytest.approx(1.05**2, rel=0.02)


def test_an_equal_seed_draws_equal_tokens() -> None:
    head, final, other = PlainHead(2.0), states(2), states(3)
    first, again, another = (
        divergence(sample, Reference(sample, final), other)
        for sample in (VocabularySample(head, final, seed) for seed in (5, 5, 6))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, another)


def test_likely_tokens_are_in_the_sample_for_certain() -> None:
    head, final = PlainHead(6.0), states(2)
    likely = head.logits(final[0]).softmax(-1).amax(0).topk(500).indices
    sample = VocabularySample(head, final, 0)
    assert torch.isin(likely, sample._tokens).all()


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "Cohere", "Granite"])
def test_rows_of_a_head_are_those_of_all_logits_with_the_models_own_scale_and_cap(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches, name: str
) -> None:
    chain = chain_of(name)
    assert chain.has_rows_of_tokens
    (batch,) = random_batches(1, 12)
    final = chain.trace(batch.input_ids, batch.position_ids).final[0]
    tokens = torch.tensor([3, 0, 41])
    torch.testing.assert_close(chain.logits(final, tokens), chain.logits(final)[:, tokens])


def test_small_vocabularies_and_heads_that_are_no_matrix_are_compared_whole(
    chain_of: Callable[..., DecoderChain], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = chain_of("llama-gqa")
    final = torch.zeros(1, 2, chain.model.config.hidden_size)
    assert logits_to_compare(chain, final, 0) is chain
    monkeypatch.setattr(sample_module, "WHOLE_UP_TO", 8)
    monkeypatch.setattr(sample_module, "SAMPLED_TOKENS", 16)
    assert isinstance(logits_to_compare(chain, final, 0), VocabularySample)
    monkeypatch.setattr(chain, "head", nn.Sequential(chain.head))
    assert logits_to_compare(chain, final, 0) is chain
