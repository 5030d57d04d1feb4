"""Run by test_pool.py in a process of its own: SGLang's calls of a chunk reach flash attention, or not, as they should.

A packed pool without a server, and a stand-in for SGLang's flash attention, whose arguments are SGLang's own.
"""

import inspect
import itertools
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch
from sglang.kernels.ops.attention.flash_attention import flash_attn_varlen_func

from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.runtime_loader.exact_ring import NewTokens, WindowReads
from kvtuner.runtime_loader.kernels import triton_attention
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import ExtendBounds, ScoreScaling
from kvtuner.runtime_loader.sglang.attention import packed_attention_backend as backend_module
from kvtuner.runtime_loader.sglang.attention.shared_chunks import SharedChunks
from kvtuner.runtime_loader.sglang.compat.attention.flash import called_by_place
from kvtuner.runtime_loader.sglang.compat.parallel import ParallelRanks
from kvtuner.runtime_loader.sglang.pools import packed_pool as pool_module
from kvtuner.runtime_loader.sglang.pools.dense_pool import PackedKVPool
from kvtuner.runtime_loader.sglang.process_state import RankState, process_state
from kvtuner.runtime_loader.torch_attention import TorchAttention

LAYERS, SIZE, GQA, ATTEND = 3, 48, 2, sys.argv[2]
WINDOW = load_profile(sys.argv[1]).window
REQUESTS, LENGTHS = torch.tensor([2, 0, 3]), [2, 4, 1]
calls: list[dict[str, object]] = []


def flash(*args, **kwargs):
    bound = inspect.signature(flash_attn_varlen_func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    calls.append(given)
    spans = (list(itertools.pairwise(given[name].tolist())) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for queries, keys in zip(*spans, strict=True):
        q, k, v = (given[name][slice(*span)].double() for name, span in (("q", queries), ("k", keys), ("v", keys)))
        products = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(GQA, 1)) * given["softmax_scale"]
        hidden = torch.ones(products.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q))
        weights = products.masked_fill(hidden, -torch.inf).softmax(-1)
        given["out"][slice(*queries)] = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(GQA, 1)).float()
    return given["out"]


profile = load_profile(sys.argv[1])
triton_attention.WORTH_READING = 0
attention = TritonAttention(torch.device("cpu"))
process_state().rank = RankState(profile, ATTEND, attention, gqa=GQA, logit_cap=0.0)
pool_module.ranks = lambda: ParallelRanks(tp_rank=1, tp_size=2, pp_rank=0, world_rank=1)
pool_module.announce = pool_module.announce_window = lambda *_: None
pool = PackedKVPool(
    SIZE, page_size=1, dtype=torch.float32, head_num=1, head_dim=16, layer_num=LAYERS, device="cpu",
    enable_memory_saver=False, start_layer=0, end_layer=LAYERS,
)  # fmt: skip
if WINDOW:
    pool.add_copies(SimpleNamespace(req_generation=torch.zeros(4), req_to_token=torch.zeros(4, 8)))
backend_module.flash_attention = lambda *_: (called_by_place(flash), "")
backend = backend_module.PackedAttnBackend.__new__(backend_module.PackedAttnBackend)
backend._shared, backend._is_reader, backend._both_ways = SharedChunks({}), False, frozenset()
backend.pool, backend.attention, backend.num_head = pool, attention, GQA
backend._window, backend.dllm_attention, backend._stored_at, backend._verifies = None, None, None, False
backend._layers = [(keys, values) for _, keys, values in pool.read_layers]
backend._flash = backend._flash_prefill()
assert backend._flash is not None and len(calls) == LAYERS, "its self-test calls it once for each layer"

generator = torch.Generator().manual_seed(0)


def states(count, heads):
    return torch.randn(count, heads, 16, generator=generator)


prefix, new = torch.tensor([0, 9, 9, 14], dtype=torch.int32), torch.tensor([0, 2, 6, 7])
slots = torch.randperm(SIZE, generator=generator)
past, own = slots[:14], slots[14:21]
for cap in (0.0, 3.0):
    calls.clear()
    expected = 0
    for layer_id in range(LAYERS):
        layer = SimpleNamespace(layer_id=layer_id, k_scale=None)
        past_k, past_v = states(14, 1), states(14, 1)
        pool.set_kv_buffer(layer, past, past_k, past_v)
        ring = pool.copies_of(layer_id)
        if ring is not None:
            ring.store(NewTokens(REQUESTS, torch.zeros_like(prefix), prefix), past_k, past_v)
        backend._window = None if ring is None else WindowReads(ring, REQUESTS)
        q, k, v = states(7, GQA), states(7, 1), states(7, 1)
        if layer_id == 0:
            backend._flash.begin()
        backend._longest = backend_module._longest_request(
            SimpleNamespace(extend_prefix_lens_cpu=[9, 0, 5], extend_seq_lens_cpu=LENGTHS)
        )
        backend._lengths = LENGTHS
        batch = SimpleNamespace()
        backend.dcp_size, backend.token_to_kv_pool = 1, pool
        backend._set_kv_buffer(batch, layer, own, k, v)
        out = torch.full((7, GQA, 16), torch.nan)
        keys, values = pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)
        backend.extend_attention_fwd = lambda *_, **__: sys.exit("SGLang's Triton kernel was called")
        if cap:
            backend.attention = SimpleNamespace(
                read_prefix=lambda *_: None, read=attention.read, extend=TorchAttention().extend,
                store_copies=attention.store_copies,
            )  # fmt: skip
        read = keys.read(own, torch.float32), values.read(own, torch.float32)
        bounds, scores, window = ExtendBounds(new, prefix, past, 4), ScoreScaling(0.25, cap), backend._window
        if window is None:
            fresh = read if ATTEND == "cache" else (k, v)
            wanted = TorchAttention().extend(q, *fresh, keys, values, bounds, scores)
        else:  # before the copies of new tokens replace those of the prefix
            window = replace(window, stored=read if ATTEND == "cache" else None)
            wanted = TorchAttention().extend(q, k, v, keys, values, bounds, scores, window=window)
        backend._forward_extend_kernel(
            layer, q, k, v, out, keys, values, new, prefix, past, None, True, None, 4, 1.0, 1.0, 0.25, logit_cap=cap,
        )  # fmt: skip
        # The kernels of an extend round queries to float16.
        allowed = 4e-3 if WINDOW.num_tokens else 2e-4
        torch.testing.assert_close(out, wanted, atol=allowed, rtol=allowed)
        if ring is not None:
            kept, _, v_kept = ring.read(0, 4)
            assert kept.max() == 3, "copies of new tokens are stored after all of them have attended"
            torch.testing.assert_close(v_kept[kept.argmax()], v[5], rtol=0, atol=0)
        # Where each query reads what is stored outside of its window, or sinks, no prefix holds for all of them.
        apart = ring is not None and (ATTEND == "cache" or WINDOW.sinks > 0)
        expected += not cap and not apart
    assert len(calls) == expected, "caps are not flash attention's"
    assert all(call["max_seqlen_k"] == 11 and call["max_seqlen_q"] == 4 for call in calls)
