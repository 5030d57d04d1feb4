"""SGLang's speculative decoding: what drafts cost beside the rows, and chains of drafts in place of trees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from sglang.srt.runtime_context import get_parallel

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat.hooks import AFTER, install

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CORPUS: Final = "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus"


def draft_bytes_per_token(kvc: Any) -> int:
    """Bytes of a token in the draft model's own pool on this rank; 0 without one.

    SGLang takes a draft's layers to cost what the target's do, and packed ones cost less.
    """
    aux = kvc.spec_aux_config
    layers = aux.eagle_draft_num_layers
    if kvc.is_draft_worker or not layers:
        return 0
    config = aux.draft_model_config or kvc.model_config
    heads: int = config.get_num_kv_heads(get_parallel().attn_tp_size)
    of_layer: int = heads * (config.head_dim + config.v_head_dim) * kvc.kv_cache_dtype.itemsize
    return int(layers) * of_layer


def check_draft_pool(pool: Any, charged: int) -> None:
    """Refuse a draft's pool whose tokens take more bytes than were charged for them."""
    slots = pool.size + pool.page_size
    taken = -(-sum(pool.get_kv_size_bytes()) // slots)
    if taken > charged:
        raise ServingError(
            f"the draft model's cache takes {taken:,} bytes per token, but {charged:,} were charged: there would be too"
            " little memory for it; drop --speculative-algorithm"
        )


def on_ngram_drafts() -> None:
    """Let NGRAM draft chains: SGLang fills up drafts with siblings of the first one, which no chain has."""

    def batch_get(result: tuple[NDArray[Any], NDArray[Any]], *_: Any) -> tuple[NDArray[Any], NDArray[Any]]:
        # Each draft after the one before it: whatever the target does not choose is dropped, here as there.
        drafts, mask = result
        length = len(mask) // max(1, len(drafts))
        chain = np.tril(np.ones((length, length), dtype=mask.dtype))
        return drafts, np.tile(chain.flatten(), len(drafts) // length)

    install(f"{_CORPUS}.batch_get", batch_get, AFTER, "req_ids", "batch_tokens", "total_lens")


def check_chain(mask: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor, prefix: torch.Tensor) -> None:
    """Refuse drafts that do not each read all before them: they are read as a chain.

    Args:
        mask: Whether a draft reads a token, bool, of each request its [drafts, prefix + drafts].
        starts: [requests + 1]; a request's part of the mask is ``mask[starts[r]:starts[r + 1]]``.
        tokens: [requests + 1]; its drafts are ``tokens[r]`` to ``tokens[r + 1]``.
        prefix: [requests + 1]; its prefix has ``prefix[r + 1] - prefix[r]`` tokens.
    """
    for start, drafts, past in zip(starts.tolist(), tokens.diff().tolist(), prefix.diff().tolist(), strict=False):
        of_request = mask[start : start + drafts * (past + drafts)].view(drafts, past + drafts)
        if not torch.equal(of_request, torch.ones_like(of_request).tril(past)):
            raise ServingError("speculative decoding gave a tree of drafts, not a chain; drop --speculative-algorithm")
