"""Chains over the tiny models, random batches for them, and a meter of live tensor memory."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from oracles.live_bytes import LiveBytes

from kvtuner.calibration.batches import Batch, batches
from kvtuner.calibration.forward.attention_hook import register_hook
from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.supported_models import read_cache_geometry

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import LoadTiny, RandomBatches


@pytest.fixture(scope="session")
def chain_of(load_tiny: LoadTiny) -> Callable[..., DecoderChain]:
    """`chain_of(family, **config_changes)`: a new chain, its counter at the probe's work, over a shared model."""

    def make(family: str = "llama-gqa", **changes: Any) -> DecoderChain:
        loaded = load_tiny(family, **changes)
        return DecoderChain(loaded.model, loaded.shape.cache)

    return make


@pytest.fixture(scope="session")
def chain_over() -> Callable[[Any], DecoderChain]:
    """A chain over a model built in a test, which may then change its weights."""

    def make(model: Any) -> DecoderChain:
        model.eval().requires_grad_(False)
        model.set_attn_implementation(register_hook())
        return DecoderChain(model, read_cache_geometry(model.config))

    return make


@pytest.fixture(scope="session")
def random_batches() -> RandomBatches:
    """`random_batches(num_sequences, tokens, batch_size=1, seed=0)`: the same tokens however they are batched."""

    def make(num_sequences: int, tokens: int, *, batch_size: int = 1, seed: int = 0) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, 320, (num_sequences, tokens), generator=generator)
        return list(batches(ids, 512, offsets="random", seed=seed, batch_size=batch_size))

    return make


@pytest.fixture(scope="session")
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """`peak_bytes(work)`: the most bytes of tensors made by `work` that were alive at once."""

    def measure(work: Callable[[], object]) -> int:
        gc.collect()
        with LiveBytes() as mode:
            work()
        return mode.peak

    return measure
