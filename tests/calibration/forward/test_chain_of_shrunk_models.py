"""Kinds of models by transformers' own defaults, made small and loaded as users do: chains of layers, or refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch
from tiny.shrunk_models import REFUSED, SHRUNK, shrunk_model

from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.calibration.model_loading import ModelSource, load_model
from kvtuner.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import MakeTokenizer, RandomBatches
    from transformers import PreTrainedModel

    from kvtuner.calibration.batches import Batch


@pytest.fixture
def chain_of(tmp_path: Path, make_tokenizer: MakeTokenizer) -> Callable[[PreTrainedModel], DecoderChain]:
    """The chain of a model that is saved and loaded again."""

    def load(model: PreTrainedModel) -> DecoderChain:
        model.save_pretrained(tmp_path)
        make_tokenizer().save_pretrained(tmp_path)
        loaded = load_model(ModelSource(str(tmp_path), device="cpu", dtype="float32", context_length=512))
        return DecoderChain(loaded.model, loaded.shape.cache)

    return load


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # GPTBigCode's own
@pytest.mark.parametrize("kind", SHRUNK)
def test_logits_through_the_chain_are_those_of_eager_attention(
    kind: str, chain_of: Callable[[PreTrainedModel], DecoderChain], random_batches: RandomBatches
) -> None:
    eager, batch = shrunk_model(kind), _one(random_batches)
    eager.set_attn_implementation("eager")
    chain = chain_of(eager)
    with torch.no_grad():
        expected = eager(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    trace = chain.trace(batch.input_ids, batch.position_ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(chain.logits(trace.final), expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "reason"), REFUSED.items())
def test_what_is_no_chain_is_refused_by_its_reason(
    kind: str, reason: str, chain_of: Callable[[PreTrainedModel], DecoderChain]
) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(reason)):
        chain_of(shrunk_model(kind))


def _one(random_batches: RandomBatches) -> Batch:
    (batch,) = random_batches(2, 29, batch_size=2)
    return batch
