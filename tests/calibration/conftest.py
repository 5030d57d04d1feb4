"""Chains over the tiny models, random batches for them, and a meter of live tensor memory."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class _LiveBytes(TorchDispatchMode):
    """Follows the storages that operators make until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        fresh = {leaf.untyped_storage()._cdata: leaf.untyped_storage() for leaf in outputs}
        for key, storage in fresh.items():
            if key not in self._known and not _holds(args, key):
                self._follow(key, storage)
        return result

    def _follow(self, key: int, storage: Any) -> None:
        size = storage.nbytes()

        def free(_: Any) -> None:
            self._known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, free)
        self.live += size
        self.peak = max(self.peak, self.live)


def _holds(args: Any, storage_key: int) -> bool:
    """Whether an operator's result is a view of what it was given."""
    leaves = (leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
    return any(leaf.untyped_storage()._cdata == storage_key for leaf in leaves)


@pytest.fixture(scope="session")
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """`peak_bytes(work)`: the most bytes of tensors made by `work` that were alive at once."""

    def measure(work: Callable[[], object]) -> int:
        gc.collect()
        with _LiveBytes() as mode:
            work()
        return mode.peak

    return measure
