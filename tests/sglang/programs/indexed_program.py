"""Run by test_indexed_latents.py: attention to what an index selects, of requests that are staged one after the other.

SGLang's sparse kernel is its stand-in, and the backend has no server around it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "fixtures"), str(TESTS.parent / "examples" / "sglang_on_cpu")]

import sglang_on_cpu  # noqa: E402, F401  # before SGLang's attention
from served_layers.stored_batch import BEFORE, MOST, NEW, RANK, ROPE, WINDOWS, StoredBatch  # noqa: E402
from sparse_attention_in_torch import flash_mla_sparse_fwd  # noqa: E402

from kvtuner.runtime_loader.sglang.attention import selected_tokens  # noqa: E402
from kvtuner.runtime_loader.sglang.attention.indexed_attention_backend import IndexedAttnBackend  # noqa: E402
from kvtuner.runtime_loader.sglang.attention.selected_tokens import as_lists  # noqa: E402

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


def check_decoding(window: Any, most: int) -> None:
    case = Case(window, (12, 5, 32), most, new=(1, 1, 1))
    batch = case.batch
    lengths = batch.positions + 1
    case.backend.forward_metadata = SimpleNamespace(
        cu_seqlens_k=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        dsa_cache_seqlens_int32=lengths.clamp(max=MOST).int(),
        page_table_1=torch.nn.utils.rnn.pad_sequence(list(batch.slots), batch_first=True).int(),
    )
    q, parts = case.queries(3), batch.latents(slice(0, 3)).split((RANK, ROPE), dim=-1)
    forward = SimpleNamespace(out_cache_loc=None, req_pool_indices=batch.requests)
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
    batch, made = case.batch, []
    case.backend.pool.keys, case.backend.pool.values = ([rows] * 4 for rows in batch.staging.rows)
    lengths = batch.positions + 1
    case.backend.forward_metadata = SimpleNamespace(
        cu_seqlens_k=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        dsa_cache_seqlens_int32=lengths.clamp(max=MOST).int(),
        page_table_1=torch.nn.utils.rnn.pad_sequence(list(batch.slots), batch_first=True).int(),
    )
    q, parts = case.queries(3), batch.latents(slice(0, 3)).split((RANK, ROPE), dim=-1)
    forward = SimpleNamespace(out_cache_loc=None, req_pool_indices=batch.requests)

    def counted(slots: Any) -> Any:
        made.append(slots)
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
    assert len(made) == (0 if window else 3 * 2), len(made)


for each in WINDOWS:
    check_layers_that_share_an_index(each)
    for limit in (8, 1000):
        check_decoding(each, limit)
        for earlier in (BEFORE, (0, 0, 0), (0, 5, 0)):
            for fresh in (True, False):
                for fused in (True, False) if each is None else (False,):
                    check_new_tokens(each, earlier, limit, is_fresh=fresh, is_fused=fused)
