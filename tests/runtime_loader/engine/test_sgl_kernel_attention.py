"""Pages go to `flash_attn_with_kvcache` as its documentation says, by a stand-in that computes what that promises."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtuner.errors import ServingError
from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.runtime_loader.engine import step_attention
from kvtuner.runtime_loader.engine.generation import SamplingParameters
from kvtuner.runtime_loader.engine.sgl_kernel_attention import SglKernelAttention, unknown_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import ProfileOf
    from torch import Tensor

    from kvtuner.runtime_loader.engine.local_engine import LocalEngine

    EngineOf = Callable[..., LocalEngine]


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=None, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, only_qv=False, sm_margin=0, return_softmax_lse=False,
    sinks=None, score_mod=None, aux_tensors=None, ver=3, out=None,
) -> Tensor:  # fmt: skip
    """Compute what the function of sglang-kernel 0.4.10 documents, under its own signature, in float32."""
    for index in (cache_seqlens, page_table, cu_seqlens_q):
        assert index.dtype == torch.int32
        assert index.is_contiguous()
    assert k is None
    assert v is None
    assert q.shape[0] == cu_seqlens_q[-1]
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    output = torch.empty(*q.shape[:2], v_cache.shape[-1], dtype=q.dtype)
    for request, length in enumerate(cache_seqlens.tolist()):
        start, stop = cu_seqlens_q[request : request + 2].tolist()
        pages = page_table[request, : -(-length // k_cache.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1)[:length].float() for cache in (k_cache, v_cache))
        group = q.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (keys, values))
        scores = q[start:stop].float().transpose(0, 1) @ keys.mT * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if causal:  # aligned to the bottom right corner
            hidden = torch.ones(stop - start, length, dtype=torch.bool).triu(1 + length - (stop - start))
            scores = scores.masked_fill(hidden, -torch.inf)
        output[start:stop] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
    return output


@pytest.mark.parametrize("page_size", [1, 16, 512])
def test_answers_are_those_of_transformers(
    page_size: int, models: Any, greedy: Any, prompt: Any, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = models(), [prompt(length) for length in (1, 17, 40)]
    wanted = [greedy(model, tokens, 8) for tokens in prompts]
    monkeypatch.setattr(
        step_attention, "choose_attention", lambda _, pool, __: SglKernelAttention(pool, flash_attn_with_kvcache)
    )
    monkeypatch.setattr("kvtuner.runtime_loader.engine.local_engine.choose_attention", step_attention.choose_attention)
    engine = engine_of(model, page_size=page_size, chunk_tokens=19)
    assert engine.attention == "sgl_kernel"
    for _ in range(2):
        answers = engine.generate(prompts, SamplingParameters(max_tokens=8, ignore_eos=True))
        assert all(each.allows(answer) for each, answer in zip(wanted, answers, strict=True))


def test_the_known_function_is_taken_and_another_refused() -> None:
    assert unknown_arguments(flash_attn_with_kvcache) is None
    refusal = unknown_arguments(lambda q, k_cache, v_cache, cache_seqlens: None)
    assert refusal is not None
    assert "does not take page_table, cu_seqlens_q" in refusal


@pytest.mark.sglang
def test_the_installed_sglang_calls_the_function_by_the_same_arguments() -> None:
    from sglang.kernels.ops.attention.flash_attention_v3 import flash_attn_with_kvcache as installed

    assert unknown_arguments(installed) is None
    # SGLang hands its own arguments on by their places; the stand-in has them in the same order.
    names = list(signature(installed).parameters)
    assert [name for name in signature(flash_attn_with_kvcache).parameters if name in names] == names


def test_what_it_cannot_read_is_named(models: Any, profile_of: ProfileOf, engine_of: EngineOf) -> None:
    model = models()
    with pytest.raises(ServingError, match=r"sgl_kernel was asked for and cannot run here: .*compute capability 9\.0"):
        engine_of(model, attention="sgl_kernel")
    profile = profile_of(model.config, [LayerQuantization(4, 4)] * 3)
    with pytest.raises(ServingError, match="sgl_kernel reads no packed rows"):
        engine_of(model, None, profile, attention="sgl_kernel")
