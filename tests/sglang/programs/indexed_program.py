"""Run by test_indexed_latents.py: attention to what an index selects, of requests that are staged one after the other.

Its memory is that of tensors without numbers, in the sizes of DeepSeek V3.2.

SGLang's sparse kernel is its stand-in, and the backend has no server around it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "fixtures"), str(TESTS.parent / "examples" / "sglang_on_cpu")]

import sglang_on_cpu  # noqa: E402, F401  # before SGLang's attention
from oracles.live_bytes import LiveBytes  # noqa: E402
from served_layers.stored_batch import BEFORE, MOST, NEW, RANK, ROPE, WINDOWS, StoredBatch  # noqa: E402
from sparse_attention_in_torch import flash_mla_sparse_fwd  # noqa: E402

from kvtuner.precision import ExactWindow  # noqa: E402
from kvtuner.runtime_loader.cpu.latent_attention import joined  # noqa: E402
from kvtuner.runtime_loader.exact_ring import ExactRing  # noqa: E402
from kvtuner.runtime_loader.packed_attention import PackedRows  # noqa: E402
from kvtuner.runtime_loader.row_format import RowFormat  # noqa: E402
from kvtuner.runtime_loader.sglang.attention import selected_tokens  # noqa: E402
from kvtuner.runtime_loader.sglang.attention.indexed_attention_backend import IndexedAttnBackend  # noqa: E402
from kvtuner.runtime_loader.sglang.attention.packed_attention_backend import PackedAttnBackend  # noqa: E402
from kvtuner.runtime_loader.sglang.attention.selected_tokens import as_lists  # noqa: E402
from kvtuner.runtime_loader.sglang.compat.attention.triton_backend import TritonAttnBackend  # noqa: E402
from kvtuner.runtime_loader.workspaces import (  # noqa: E402
    WORKSPACE_BYTES,
    AttentionShape,
    attention_bytes,
    decode_scratch_bytes,
    new_tokens_bytes,
    staged_in_graphs_bytes,
)

HEADS, SCALE = 2, 0.2
LAYER = SimpleNamespace(
    layer_id=0, logit_cap=0.0, scaling=SCALE, v_head_dim=RANK, head_dim=RANK + ROPE, tp_q_head_num=HEADS
)


class Case:
    """A batch, and a backend that stages at most so many tokens together."""

    def __init__(
        self, window: Any, before: tuple[int, ...], most: int, new: tuple[int, ...] = NEW, *, is_fresh: bool = True,
        is_fused: bool = False,
    ) -> None:  # fmt: skip
        self.batch = StoredBatch(window, before, new)
        staging = self.batch.staging
        self.backend = IndexedAttnBackend.__new__(IndexedAttnBackend)
        self.backend.pool = SimpleNamespace(
            keys=[staging.rows[0]], values=[staging.rows[1]], copies_of=lambda _: staging.copies, start_layer=0,
            new_states=lambda k, v: k.split((RANK, ROPE), dim=-1), set_mla_kv_buffer=lambda *_: None,
            forget_former_requests=lambda: None, has_index=lambda layer_id: layer_id % 2 == 0,
        )  # fmt: skip
        self.backend.attention, self.backend._is_fresh = staging.attention, is_fresh
        self.backend.use_fused_topk, self.backend._most_staged = is_fused, most
        self.backend._num_copies = window.num_tokens if window else 0
        self.staged: list[int] = []
        self.backend._forward_flashmla_sparse = self.sparse
        self.generator = torch.Generator().manual_seed(1)

    def sparse(
        self, q_all: Any, kv_cache: Any, page_table_1: Any, sm_scale: float, v_head_dim: int, topk_length: Any
    ) -> Any:
        self.staged.append(len(kv_cache))
        return flash_mla_sparse_fwd(q_all, kv_cache, page_table_1[:, None], sm_scale, v_head_dim, None, topk_length)[0]

    def queries(self, number: int) -> torch.Tensor:
        return torch.randn(number, HEADS, RANK + ROPE, generator=self.generator)

    def wanted(self, q: torch.Tensor, latents: list[torch.Tensor]) -> torch.Tensor:
        rows = torch.cat(latents).double()
        return (q.double() @ rows.T * SCALE).softmax(-1) @ rows[:, :RANK]


def check_new_tokens(window: Any, before: tuple[int, ...], most: int, *, is_fresh: bool, is_fused: bool) -> None:
    case = Case(window, before, most, is_fresh=is_fresh, is_fused=is_fused)
    batch, number, new = case.batch, sum(NEW), torch.tensor(NEW)
    lengths = [past + count for past, count in zip(before, NEW, strict=True)]
    first = torch.tensor([0, *lengths]).cumsum(0)[:-1].int().repeat_interleave(new)
    case.backend.forward_metadata = SimpleNamespace(
        topk_indices_offset=first, dsa_seqlens_expanded=(batch.positions + 1).int(),
        page_table_1_flattened=torch.cat(list(batch.slots)).int() if any(before) else None,
        token_to_batch_idx=batch.numbers.int(), cu_seqlens_q=torch.tensor([0, *NEW]).cumsum(0).int(),
        dsa_cache_seqlens_int32=(batch.positions + 1).clamp(max=MOST).int(),
    )  # fmt: skip
    forward = SimpleNamespace(
        out_cache_loc=torch.cat([slots[past:] for slots, past in zip(batch.slots, before, strict=True)]),
        seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths), extend_seq_lens=new,
        extend_seq_lens_cpu=list(NEW), req_pool_indices=batch.requests,
    )  # fmt: skip
    q, latents = case.queries(number + 2), batch.latents(slice(0, number))
    selected = torch.where(batch.selected >= 0, batch.selected + first[:, None], -1) if is_fused else batch.selected
    kept = selected.clone()
    wanted = [
        case.wanted(q[token], [batch.wanted(token, at, is_fresh=is_fresh) for at in positions if at >= 0])
        for token, positions in enumerate(batch.selected.tolist())
    ]
    parts = latents.split((RANK, ROPE), dim=-1)
    found = case.backend.forward_extend(q, parts[0], parts[0], LAYER, forward, k_rope=parts[1], topk_indices=selected)
    assert torch.equal(selected, kept), "layers share what was selected"
    torch.testing.assert_close(found[:number].double(), torch.stack(wanted), rtol=1e-5, atol=1e-6)
    assert not found[number:].any(), "these only fill the batch"
    assert len(case.staged) == (1 if most == 1000 else 3), case.staged


def decoding(case: Case) -> tuple[Any, Any, Any]:
    """The queries, both parts of the latents, and the batch of a step of decoding, whose metadata the backend has."""
    batch = case.batch
    lengths = batch.positions + 1
    case.backend.forward_metadata = SimpleNamespace(
        cu_seqlens_k=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        dsa_cache_seqlens_int32=lengths.clamp(max=MOST).int(),
        page_table_1=torch.nn.utils.rnn.pad_sequence(list(batch.slots), batch_first=True).int(),
    )
    q, parts = case.queries(3), batch.latents(slice(0, 3)).split((RANK, ROPE), dim=-1)
    forward = SimpleNamespace(out_cache_loc=None, req_pool_indices=batch.requests)
    return q, parts, forward


def check_decoding(window: Any, most: int) -> None:
    case = Case(window, (12, 5, 32), most, new=(1, 1, 1))
    batch = case.batch
    q, parts, forward = decoding(case)
    wanted = [
        case.wanted(q[token], [batch.wanted(token, at, is_fresh=False) for at in positions if at >= 0])
        for token, positions in enumerate(batch.selected.tolist())
    ]
    found = case.backend.forward_decode(
        q, parts[0], parts[0], LAYER, forward, k_rope=parts[1], topk_indices=batch.selected
    )
    torch.testing.assert_close(found.double(), torch.stack(wanted), rtol=1e-5, atol=1e-6)
    assert len(case.staged) == (0 if window is None else 1 if most == 1000 else 3), case.staged


def check_layers_that_share_an_index(window: Any) -> None:
    """Lists are made once for an index, anew in each forward, where the index writes to the same memory too."""
    case = Case(window, (12, 5, 32), 1000, new=(1, 1, 1))
    batch, listed = case.batch, []
    case.backend.pool.keys, case.backend.pool.values = ([rows] * 4 for rows in batch.staging.rows)
    q, parts, forward = decoding(case)

    def counted(slots: Any) -> Any:
        listed.append(slots)
        return as_lists(slots)

    selected_tokens.as_lists = counted
    selected = batch.selected.clone()
    for fewer in (0, 1, 2):
        selected.copy_(torch.where(torch.arange(MOST) < MOST - fewer, batch.selected, -1))
        selected[2, 1:3] = selected[2, 1:3].flip(0)
        for layer_id in range(4):
            if layer_id == 2:  # whose index selects less
                selected[:, 1] = -1
            layer = SimpleNamespace(**{**vars(LAYER), "layer_id": layer_id})
            wanted = [
                case.wanted(q[token], [batch.wanted(token, at, is_fresh=False) for at in positions if at >= 0])
                for token, positions in enumerate(selected.tolist())
            ]
            found = case.backend.forward_decode(
                q, parts[0], parts[0], layer, forward, k_rope=parts[1], topk_indices=selected
            )
            torch.testing.assert_close(found.double(), torch.stack(wanted), rtol=1e-5, atol=1e-6)
    selected_tokens.as_lists = as_lists
    assert len(listed) == (0 if window else 3 * 2), len(listed)


class MetaAttention:
    """Attention that reads rows back as tensors without memory, and copies nothing."""

    def read(self, stored: PackedRows, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(len(slots), 1, stored.format.head_dim, dtype=dtype, device="meta")

    def store_copies(self, *_: Any) -> None:
        pass


DEEPSEEK = AttentionShape(
    16, 1, 512, 512, 1024, 8192, 0, context_length=131_072, window_tokens=0, rope_dim=64, index_topk=2048
)
"""DeepSeek V3.2 on one of eight ranks."""
SLACK = 28 << 20
"""Places are looked up in 31 or 36 bytes of the 40 that are counted, and by `fresh` new tokens are held once."""


def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta")


def meta_backend(window: ExactWindow | None, *, is_fresh: bool) -> IndexedAttnBackend:
    """A backend of DeepSeek V3.2's sizes, whose attention to staged latents puts next to nothing out."""
    backend, ring = IndexedAttnBackend.__new__(IndexedAttnBackend), None
    if window is not None:
        copies = (empty(601, window.num_tokens, 1, size, dtype=torch.bfloat16) for size in (512, 64))
        ring = ExactRing(*copies, empty(601, window.num_tokens), window)
    backend.pool = SimpleNamespace(
        **{name: [PackedRows(empty(1), RowFormat(1, size, None))] for name, size in (("keys", 512), ("values", 64))},
        copies_of=lambda _: ring, start_layer=0, new_states=lambda k, v: k.split((512, 64), dim=-1),
        set_mla_kv_buffer=lambda *_: None, forget_former_requests=lambda: None, has_index=lambda _: True,
    )  # fmt: skip
    backend.attention, backend._is_fresh, backend.use_fused_topk = MetaAttention(), is_fresh, True
    backend._num_copies = window.num_tokens if window else 0
    backend._most_staged = WORKSPACE_BYTES // (2 * 576)
    backend._forward_flashmla_sparse = lambda q_all, **_: q_all.new_empty(len(q_all), 1, 1)
    return backend


def meta_states(tokens: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Queries, keys and values of new tokens and a layer, and what attention is told by name."""
    q, q_rope = (empty(tokens, 16, size, dtype=torch.bfloat16) for size in (512, 64))
    k, k_rope = (empty(tokens, 1, size, dtype=torch.bfloat16) for size in (512, 64))
    layer = SimpleNamespace(layer_id=0, logit_cap=0.0, scaling=SCALE, v_head_dim=512, head_dim=576, tp_q_head_num=16)
    return (q, k, k, layer), {"q_rope": q_rope, "k_rope": k_rope, "topk_indices": empty(tokens, 2048)}


def staged_bytes(backend: IndexedAttnBackend, new: tuple[int, ...], before: tuple[int, ...]) -> int:
    """The most bytes at once that a chunk takes beside its queries."""
    tokens, lengths = sum(new), [past + count for past, count in zip(before, new, strict=True)]
    backend.forward_metadata = SimpleNamespace(
        topk_indices_offset=empty(tokens), dsa_seqlens_expanded=empty(tokens), token_to_batch_idx=empty(tokens),
        page_table_1_flattened=empty(sum(lengths)), cu_seqlens_q=empty(len(new) + 1),
        dsa_cache_seqlens_int32=empty(tokens),
    )  # fmt: skip
    forward = SimpleNamespace(
        out_cache_loc=empty(tokens), seq_lens=empty(len(new)), seq_lens_cpu=torch.tensor(lengths),
        extend_seq_lens=empty(len(new)), extend_seq_lens_cpu=list(new), req_pool_indices=empty(len(new)),
    )  # fmt: skip
    given, named = meta_states(tokens)
    with LiveBytes() as live:
        backend.forward_extend(*given, forward, **named)
    return live.peak - tokens * 16 * 576 * 2


def check_the_memory_of_new_tokens() -> None:
    """One request fills the workspace, and two do so one after the other."""
    whole = WORKSPACE_BYTES // (2 * 576) - 32
    for window, is_fresh in product((None, ExactWindow(32)), (True, False)):
        shape = replace(DEEPSEEK, window_tokens=window.num_tokens if window else 0)
        reserved = attention_bytes(shape) - decode_scratch_bytes(shape)
        one, two = (
            staged_bytes(meta_backend(window, is_fresh=is_fresh), new, tuple(whole - count for count in new))
            for new in ((8192,), (4096, 4096))
        )
        assert reserved - SLACK < one <= reserved, (window, is_fresh, one, reserved)
        assert two <= reserved, (window, is_fresh, two, reserved)


def check_the_memory_of_decoding() -> None:
    """Requests are staged together, and more of them one after the other."""
    for requests in (8, 224, 300, 600):
        shape = replace(DEEPSEEK, window_tokens=32, graph_requests=requests)
        backend, (given, named) = meta_backend(ExactWindow(32), is_fresh=True), meta_states(requests)
        backend.forward_metadata = SimpleNamespace(
            cu_seqlens_k=empty(requests + 1), dsa_cache_seqlens_int32=empty(requests)
        )
        forward = SimpleNamespace(out_cache_loc=None, req_pool_indices=empty(requests))
        with LiveBytes() as live:
            backend.forward_decode(*given, forward, **named)
        taken, reserved = live.peak - requests * 17 * 576 * 2, staged_in_graphs_bytes(shape)
        # Slots that rows are read from and places that are looked up are not held at once.
        assert reserved - (5 << 20) < taken <= reserved, (requests, taken, reserved)


def check_the_memory_of_a_chunk_without_an_index() -> None:
    """What new tokens take beside a prefix that is read back: as they are read, and by `cache` as they were stored."""
    keys, values = (PackedRows(empty(1), RowFormat(1, size, None)) for size in (512, 64))
    reserved, taken = new_tokens_bytes(replace(DEEPSEEK, index_topk=0)), []
    TritonAttnBackend._forward_extend_kernel = lambda *_, **__: None
    for attend in ("fresh", "cache"):
        backend = PackedAttnBackend.__new__(PackedAttnBackend)
        backend._both_ways, backend._verifies, backend._is_reader = frozenset(), False, True
        backend._window = backend._flash = None
        backend._stored_at, prefix, bounds = empty(8192), empty(1000, 1, 576, dtype=torch.bfloat16), empty(2)
        backend.pool = SimpleNamespace(
            new_states=lambda k, _: k.split((512, 64), dim=-1), read_states=joined,
            rank_state=SimpleNamespace(attend=attend),
        )  # fmt: skip
        backend.attention = MetaAttention()
        backend.attention.read_prefix = lambda *_, both=prefix: (both, both[..., :512])
        (q, k, v, layer), _ = meta_states(8192)
        states, slots, layer = torch.cat((k, k[..., :64]), dim=-1), empty(1000), SimpleNamespace(layer_id=0)
        with LiveBytes() as live:
            backend._forward_extend_kernel(
                layer, q, states, v, q, keys, values, bounds, bounds, slots, None, True, None, 8192, 1.0, 1.0, SCALE
            )  # fmt: skip
        taken.append(live.peak)
    assert taken == [reserved // 2, reserved], (taken, reserved)


check_the_memory_of_a_chunk_without_an_index()
check_the_memory_of_new_tokens()
check_the_memory_of_decoding()
for each in WINDOWS:
    check_layers_that_share_an_index(each)
    for limit in (8, 1000):
        check_decoding(each, limit)
        for earlier in (BEFORE, (0, 0, 0), (0, 5, 0)):
            for fresh in (True, False):
                for fused in (True, False) if each is None else (False,):
                    check_new_tokens(each, earlier, limit, is_fresh=fresh, is_fused=fused)
