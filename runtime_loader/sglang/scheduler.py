"""A scheduler process: its pool and attention are made here, and ranks agree on what they serve."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtuner.errors import ServingError
from kvtuner.precision import NO_WINDOW
from kvtuner.runtime_loader.attention_backends import BACKEND_VARIABLE, backend_for, latent_backend
from kvtuner.runtime_loader.exact_ring import most_requests, request_bytes
from kvtuner.runtime_loader.row_format import LayerFormat, pool_formats
from kvtuner.runtime_loader.sglang.compat.capacity import RankBytes, chunk_tokens, graph_requests, on_capacity
from kvtuner.runtime_loader.sglang.compat.lmcache import on_lmcache
from kvtuner.runtime_loader.sglang.compat.model import has_attention_sinks, selected_tokens
from kvtuner.runtime_loader.sglang.compat.parallel import ranks, tell_all
from kvtuner.runtime_loader.sglang.compat.pool import MHATokenToKVPool, on_built, on_pool, on_stored_layers
from kvtuner.runtime_loader.sglang.compat.processes import on_beam_search, on_introduction
from kvtuner.runtime_loader.sglang.graph_advice import recommend_graph
from kvtuner.runtime_loader.sglang.pools.dense_pool import PackedKVPool
from kvtuner.runtime_loader.sglang.pools.indexed_pool import IndexedLatentPool
from kvtuner.runtime_loader.sglang.pools.latent_pool import PackedLatentPool
from kvtuner.runtime_loader.sglang.pools.packed_pool import PackedPool
from kvtuner.runtime_loader.sglang.pools.self_test import announce_capacity, announce_states, announce_window_layers
from kvtuner.runtime_loader.sglang.process_state import (
    PROFILE_KEY,
    READS_KEY,
    WINDOW_KEY,
    RankState,
    process_state,
)
from kvtuner.runtime_loader.sglang.transfers import install_transfers, tell_of_windows
from kvtuner.runtime_loader.workspaces import AttentionShape, attention_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.runtime_loader.attention_backends import AttentionBackend
    from kvtuner.runtime_loader.packed_attention import PackedAttention
    from kvtuner.runtime_loader.sglang.hicache.tier import HostTier

logger: Final = logging.getLogger("kvtuner")

AGREEMENT_VARIABLE: Final = "KVTUNER_AGREEMENT_S"
"""The variable of the seconds that a rank waits for the others' word; 120 by default."""


def install_hooks(*, packed: bool, indexed: bool, tiers: bool, transfers: bool, lmcache: bool) -> None:
    """Hook this process's pool, capacity and attention if the device pool is `packed`, and its host `tiers` if any.

    The attention is that of a model which is `indexed` or not. Hooked are its `transfers` too, where prompts are
    computed on another server than answers, and the name of what is stored in `lmcache`.
    """
    on_introduction(lambda: _introduction(packed=packed))
    if packed:
        on_stored_layers(_first_reader)
        on_pool(PackedKVPool, PackedLatentPool, IndexedLatentPool, announce_window_layers, announce_states)
        on_capacity(
            RankBytes(_bytes_per_token, _bytes_per_request, _workspace_bytes, _most_requests), announce_capacity
        )
        (hook_sparse_backend if indexed else hook_backend)()
        on_beam_search(_refusal_of_beams)
    if transfers:
        install_transfers(lambda: f"{_served()} {process_state().active_rank().dtype}")
    if lmcache:
        on_lmcache(_stored_as)
    pool_classes = (PackedKVPool, PackedLatentPool, IndexedLatentPool) if packed else (MHATokenToKVPool,)
    if not tiers:
        on_built(pool_classes, lambda _, pool, requests: _complete(pool, requests))
        return
    # Imported here because it brings SGLang's cache controllers along.
    from kvtuner.runtime_loader.sglang.hicache.tier import HostTier

    tier = HostTier()

    def built(kvc: Any, pool: Any, requests: Any) -> None:
        _complete(pool, requests)
        _begin_tier(tier, kvc, pool)

    on_built(pool_classes, built)
    tier.install()


def hook_backend() -> None:
    """Hook the attention of layers that read all of what they cache."""
    # Imported here because SGLang's own device pool is read by whichever backend the user likes.
    from kvtuner.runtime_loader.sglang.attention.packed_attention_backend import make_backend
    from kvtuner.runtime_loader.sglang.compat.attention.triton_backend import on_triton_backend

    on_triton_backend(make_backend)


def hook_sparse_backend() -> None:
    """Hook the attention of layers of which an index selects what is read."""
    from kvtuner.runtime_loader.sglang.attention.indexed_attention_backend import make_indexed_backend
    from kvtuner.runtime_loader.sglang.compat.attention.sparse_backend import on_sparse_backend

    on_sparse_backend(make_indexed_backend)


def _introduction(*, packed: bool) -> dict[str, Any]:
    """Return what this process tells its launcher, and a server whoever asks for its `/server_info`."""
    # A device pool in the model's dtype has no copies.
    window = _profile().window if packed else NO_WINDOW
    return {
        PROFILE_KEY: _profile().digest,
        READS_KEY: process_state().active().request.attend if packed else "below",
        WINDOW_KEY: asdict(window),
    }


def _refusal_of_beams() -> str | None:
    # Beams take one another's tokens over, in slots that their copies do not follow to.
    window = _profile().window
    return f"Beam search is not supported with an exact window ({window})." if window.num_tokens else None


def _complete(pool: Any, requests: Any) -> None:
    # A device pool in the model's dtype is exact as it is.
    if isinstance(pool, PackedPool):
        pool.add_copies(requests)
        tell_of_windows(pool)
        if pool.keys[0].rows.is_cuda:
            recommend_graph(graph_requests(), requests.size, *pool.bytes_per_token)


def _begin_tier(tier: HostTier, kvc: Any, pool: Any) -> None:
    # Once the device pool is built, and before SGLang builds a host pool for it.
    from kvtuner.runtime_loader.sglang.hicache.page_identity import PageSource

    request = process_state().active().request
    packed = not request.hicache_only
    if not packed:
        _check_dtype(kvc)
        profile = _profile(kvc.model_config)
        _agree(f"{profile.digest} below the device")
        if profile.window.num_tokens:
            logger.info("kvtuner: the device pool is exact, so that %s needs no copies", profile.window)
    source = PageSource(
        profile=_profile(),
        attend=request.attend,
        packed=packed,
        model=kvc.model,
        config=kvc.model_config,
        make_mover=_backend(kvc).make_mover,
        agreement_s=_agreement_seconds(),
    )
    tier.begin(source, pool)


def _check_dtype(kvc: Any) -> None:
    # 16-bit layers, and a device pool that stays as it is, are in the model's dtype.
    if kvc.kv_cache_dtype != kvc.model_config.dtype:
        raise ServingError(
            f"the checkpoint or --kv-cache-dtype asks for a cache of {kvc.kv_cache_dtype}, but the model is served in"
            f" {kvc.model_config.dtype}, which 16-bit layers keep; serve with"
            f" --kv-cache-dtype {str(kvc.model_config.dtype).removeprefix('torch.')}"
        )


def _profile(model_config: Any = None) -> Profile:
    # Built or checked for the first caller that knows the model.
    state = process_state()
    if state.rank_profile is None:
        if model_config is None:
            raise ServingError("SGLang built no KV pool before it said that it is ready")
        state.rank_profile = state.active().profile(model_config)
    return state.rank_profile


def _first_reader(model_config: Any) -> int | None:
    """Return the first layer that reads another one's keys, behind which all others do; None without any."""
    geometry = _profile(model_config).geometry.whole()
    first = len(geometry.layers) - geometry.num_shared_layers
    assert all(layer.kind.name != "shared" for layer in geometry.layers[:first]), "a configuration names the last ones"
    return first if geometry.num_shared_layers else None


def _bytes_per_token(kvc: Any, layers: Sequence[int]) -> int:
    """Return the real bytes of one token in these layers on this rank, by which SGLang divides its memory."""
    state, here = process_state(), ranks()
    attend = state.active().request.attend
    _check_dtype(kvc)
    profile = _profile(kvc.model_config)
    # SGLang asks again where it sizes pools anew; ranks agree once.
    if state.rank is None:
        _agree(_served())
    formats = _formats(profile, layers)
    if state.rank is None:
        geometry = profile.tuned_geometry()
        num_heads = geometry.num_attention_heads // here.tp_size
        num_kv_heads = len(geometry.kv_heads_of_rank(here.tp_rank, here.tp_size))
        cap = getattr(kvc.model_config.hf_text_config, "attn_logit_softcapping", None) or 0.0
        attention = _attention(torch.device(kvc.device), profile)
        gqa, dtype = num_heads // num_kv_heads, str(kvc.kv_cache_dtype).removeprefix("torch.")
        state.rank = RankState(
            profile, attend, attention, gqa, float(cap), dtype, has_attention_sinks(kvc.model_config)
        )
    return sum(layer.bytes_per_token(kvc.kv_cache_dtype) for layer in formats)


def _formats(profile: Profile, layers: Sequence[int]) -> tuple[LayerFormat, ...]:
    here = ranks()
    return pool_formats(profile, layers, tp_rank=here.tp_rank, tp_size=here.tp_size)


def _bytes_per_request(kvc: Any, layers: Sequence[int]) -> int:
    """Return the bytes of a request slot's exact copies on this rank."""
    profile = _profile(kvc.model_config)
    return (
        request_bytes(_formats(profile, layers), profile.window, kvc.kv_cache_dtype) if profile.window.num_tokens else 0
    )


def _most_requests(kvc: Any, num_tokens: int) -> int | None:
    """Return how many requests leave most memory to rows, the same on all ranks; None without a window."""
    profile = _profile(kvc.model_config)
    if not profile.window.num_tokens:
        return None
    formats = _formats(profile, profile.tuned_geometry().ids)
    token = sum(layer.bytes_per_token(kvc.kv_cache_dtype) for layer in formats)
    token += profile.index_bytes
    return most_requests(num_tokens, token, request_bytes(formats, profile.window, kvc.kv_cache_dtype))


def _workspace_bytes(kvc: Any) -> int:
    """Return the bytes that attention takes of a GPU, which SGLang's memory share does not know."""
    profile = _profile(kvc.model_config)
    shape = AttentionShape.of(
        profile.tuned_geometry(), tp_size=ranks().tp_size,
        chunk_tokens=chunk_tokens(), graph_requests=graph_requests(),
        context_length=kvc.model_config.context_len, window_tokens=profile.window.num_tokens,
        index_topk=selected_tokens(kvc.model_config),
        attends_cache=process_state().active().request.attend == "cache",
    )  # fmt: skip
    return attention_bytes(shape) if torch.device(kvc.device).type == "cuda" else 0


def _served() -> str:
    """Return what rows are made by here, in a word that ranks and servers compare."""
    return f"{_profile().digest} attend={process_state().active().request.attend}"


def _stored_as(model: str) -> str:
    """Return a model's name in a storage that compares nothing else; some make it a part of files' names."""
    digest = _profile().digest.removeprefix("sha256:")[:32]
    return f"{model}/kvtuner-{digest}-{process_state().active().request.attend}"


def _backend(kvc: Any) -> AttentionBackend:
    return backend_for(torch.device(kvc.device), os.environ.get(BACKEND_VARIABLE) or None)


def _attention(device: torch.device, profile: Profile) -> PackedAttention:
    name = os.environ.get(BACKEND_VARIABLE) or None
    if not profile.tuned_geometry().is_latent:
        return backend_for(device, name).make(device)
    make = latent_backend(device, name).make_of_latents
    assert make is not None
    return make(device)


def _agreement_seconds() -> float:
    text = os.environ.get(AGREEMENT_VARIABLE) or "120"
    if not text.isdecimal():
        raise ServingError(f"{AGREEMENT_VARIABLE} must be a whole number of seconds, not {text!r}")
    return float(text)


def _agree(word: str) -> None:
    words = tell_all("kvtuner/profile", word, _agreement_seconds())
    for rank, other in words.items():
        if other != word:
            answer = "nothing: was its server started with the same --kvtuner-profile?" if other is None else other
            raise ServingError(
                f"ranks must serve one profile, but rank {ranks().world_rank} has {word} and rank {rank} says {answer}"
            )
