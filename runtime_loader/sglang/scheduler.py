"""A scheduler process: its pool and backend are made here, checked and announced."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.packed_attention import TorchAttention
from kvtuner.runtime_loader.row_format import rank_formats
from kvtuner.runtime_loader.sglang.compat.parallel import ranks, tell_all
from kvtuner.runtime_loader.sglang.compat.processes import on_introduction
from kvtuner.runtime_loader.sglang.serving import PROFILE_KEY, READS_KEY, active, refusing

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.runtime_loader.packed_attention import PackedAttention
    from kvtuner.runtime_loader.sglang.request import Attend

IMPLEMENTATION_VARIABLE: Final = "KVTUNER_ATTENTION"
"""Implementation of a server on a processor: torch, or triton for the kernels in Triton's interpreter."""
AGREEMENT_VARIABLE: Final = "KVTUNER_AGREEMENT_S"
"""Seconds that a rank waits for the others' word; 120 by default."""


@dataclass(frozen=True, slots=True)
class RankServing:
    """What this rank serves with.

    Attributes:
        profile: of the whole model.
        attend: what a chunk reads of itself.
        attention: implementation in use.
        gqa: query heads of a KV head.
        logit_cap: of the model's scores; 0 for none.
    """

    profile: Profile
    attend: Attend
    attention: PackedAttention
    gqa: int
    logit_cap: float


_serving: RankServing | None = None


def serving_of_rank() -> RankServing:
    """What this rank serves with, once the size of its pool was asked for.

    Raises:
        ServingError: nothing was.
    """
    if _serving is None:
        raise ServingError("SGLang built its KV pool before it asked how many tokens fit")
    return _serving


def install(*, packed: bool, tiers: bool) -> None:
    """Hook this process's pool, capacity and attention, or its host tiers alone.

    Args:
        packed: whether the device pool holds packed rows.
        tiers: whether there is a host pool.

    Raises:
        ServingError: a seam that another plugin has, or that is gone.
    """
    from kvtuner.runtime_loader.sglang.attention_backend import make_backend
    from kvtuner.runtime_loader.sglang.compat.attention import on_triton_backend
    from kvtuner.runtime_loader.sglang.compat.pool import MHATokenToKVPool, on_built, on_pool
    from kvtuner.runtime_loader.sglang.packed_pool import PackedKVPool
    from kvtuner.runtime_loader.sglang.self_test import announce_capacity

    on_introduction(lambda: {PROFILE_KEY: _profile().digest, READS_KEY: active().attend if packed else "below"})
    if packed:
        on_pool(PackedKVPool, _bytes_per_token, announce_capacity, refusing)
        on_triton_backend(make_backend)
    on_built(PackedKVPool if packed else MHATokenToKVPool, _begin_tiers if tiers else lambda *_: None, refusing)
    if tiers:
        from kvtuner.runtime_loader.sglang.hicache import tier

        tier.install(refusing)


def _begin_tiers(kvc: Any, pool: Any) -> None:
    """A device pool was built: what lies below it, SGLang asks for later."""
    from kvtuner.runtime_loader.sglang.hicache import tier
    from kvtuner.runtime_loader.sglang.hicache.page_identity import TieredRank

    serving = active()
    packed, device = not serving.request.hicache_only, torch.device(kvc.device)
    if not packed:
        _check_dtype(kvc)
        profile = _profile(kvc.model_config)
        _agree(f"{profile.digest} below the device")
    rank = TieredRank(
        profile=_profile(),
        attend=serving.attend,
        packed=packed,
        model=kvc.model,
        config=kvc.model_config,
        kernels=_implementation_name(device) == "triton",
        agreement_s=_agreement_seconds(),
    )
    tier.begin(rank, pool)


def _check_dtype(kvc: Any) -> None:
    """Check that 16-bit layers, or a device pool that stays as it is, are in the model's dtype."""
    if kvc.kv_cache_dtype != kvc.model_config.dtype:
        raise ServingError(
            f"the checkpoint or --kv-cache-dtype asks for a cache of {kvc.kv_cache_dtype}, but the model is served in"
            f" {kvc.model_config.dtype}, which 16-bit layers keep; serve with"
            f" --kv-cache-dtype {str(kvc.model_config.dtype).removeprefix('torch.')}"
        )


_served_profile: Profile | None = None


def _profile(model_config: Any = None) -> Profile:
    """What this rank serves: found once, for the first that knows the model.

    Raises:
        ServingError: nobody did.
    """
    global _served_profile
    if _served_profile is None:
        if model_config is None:
            raise ServingError("SGLang built no KV pool before it said that it is ready")
        _served_profile = active().profile(model_config)
    return _served_profile


def _bytes_per_token(kvc: Any, layers: range) -> int:
    """Real bytes of one token on this rank: what SGLang divides its memory by."""
    global _serving
    serving = active()
    _check_dtype(kvc)
    profile = _profile(kvc.model_config)
    if _serving is None:
        _agree(f"{profile.digest} attend={serving.attend}")
    here = ranks()
    formats = rank_formats(profile, layers, tp_rank=here.tp_rank, tp_size=here.tp_size)
    if _serving is None:
        num_heads = profile.geometry.num_attention_heads // here.tp_size
        cap = getattr(kvc.model_config.hf_text_config, "attn_logit_softcapping", None) or 0.0
        attention = _implementation(torch.device(kvc.device))
        _serving = RankServing(profile, serving.attend, attention, num_heads // formats[0].k.num_heads, float(cap))
    return sum(entry.bytes_per_token(kvc.kv_cache_dtype) for entry in formats)


def _implementation_name(device: torch.device) -> str:
    """Kernels on a GPU; on a processor plain torch, or what the environment says.

    Raises:
        ServingError: another device, another word, or kernels where they do not run.
    """
    by_device = {"cuda": "triton", "cpu": "torch"}
    name = os.environ.get(IMPLEMENTATION_VARIABLE) or by_device.get(device.type)
    if name is None or name not in by_device.values() or (name == "torch" and device.type != "cpu"):
        raise ServingError(f"{IMPLEMENTATION_VARIABLE}={name} is no implementation of attention on {device}; unset it")
    if name == "triton" and torch.version.hip:
        raise ServingError("the kernels were never tried on a GPU of AMD; serve without a profile")
    return name


def _implementation(device: torch.device) -> PackedAttention:
    if _implementation_name(device) == "torch":
        return TorchAttention()
    try:
        from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
    except ImportError as error:
        raise ServingError(f"the kernels need Triton 3.6 or newer: {error}; install it") from error
    return TritonAttention(device)


def _agreement_seconds() -> float:
    text = os.environ.get(AGREEMENT_VARIABLE) or "120"
    if not text.isdecimal():
        raise ServingError(f"{AGREEMENT_VARIABLE} must be a whole number of seconds, not {text!r}")
    return float(text)


def _agree(word: str) -> None:
    words = tell_all("kvtuner/profile", word, _agreement_seconds())
    for rank, other in words.items():
        if other != word:
            said = "nothing: was its server started with the same --kvtuner-profile?" if other is None else other
            raise ServingError(
                f"ranks must serve one profile, but rank {ranks().world_rank} has {word} and rank {rank} says {said}"
            )
