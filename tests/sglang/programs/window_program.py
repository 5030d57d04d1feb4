"""Run by test_pool.py in a process of its own: a pool with an exact window, which tests itself as it is built."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

from kvtuner.errors import ServingError
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.runtime_loader.exact_ring import EMPTY, ExactRing, ExactRings, NewTokens
from kvtuner.runtime_loader.sglang.compat.parallel import ParallelRanks
from kvtuner.runtime_loader.sglang.pools import packed_pool as pool_module
from kvtuner.runtime_loader.sglang.pools.dense_pool import PackedKVPool
from kvtuner.runtime_loader.sglang.process_state import RankState, process_state
from kvtuner.runtime_loader.torch_attention import TorchAttention

DTYPE, SIZE, SLOTS, TRITON = getattr(torch, sys.argv[2]), int(sys.argv[3]), 5, sys.argv[4] == "triton"

profile = load_profile(sys.argv[1])
pool_module.ranks = lambda: ParallelRanks(tp_rank=1, tp_size=2, pp_rank=0, world_rank=1)
pool_module.announce = pool_module.announce_window = lambda *_: None


def build(attention, attend="fresh"):
    process_state().rank = RankState(profile, attend, attention, gqa=2, logit_cap=2.0)
    pool = PackedKVPool(
        SIZE, page_size=1, dtype=DTYPE, head_num=1, head_dim=16, layer_num=2, device="cpu",
        enable_memory_saver=False, start_layer=1, end_layer=3,
    )  # fmt: skip
    generations = torch.tensor([3, 0, 1, 0, 0])
    pool.add_copies(SimpleNamespace(req_generation=generations, req_to_token=torch.zeros(SLOTS, 8)))
    return pool, generations


if TRITON:
    from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention

    build(TritonAttention(torch.device("cpu")))
    sys.exit()

for attend in ("fresh", "cache"):
    pool, generations = build(TorchAttention(), attend)
    # It leaves nothing behind: neither rows nor copies, nor requests that the slots would have had.
    assert not any(rows.any() for rows in (*pool.k_buffer, *pool.v_buffer))
    for layer in (0, 1):
        ring = pool.copies[layer]
        assert (ring.positions == EMPTY).all()
        assert not ring.keys.any()
        assert not ring.values.any()
        ring.positions[0, 0] = 0
    pool.forget_former_requests()
    assert all(pool.copies[layer].positions[0, 0] == 0 for layer in (0, 1)), "the slot's request is the same"


class Elsewhere(TorchAttention):
    """Places do not follow positions."""

    def store_copies(self, ring, new, k, v):
        super().store_copies(ring, new, k, v)
        ring.positions[:] = ring.positions.roll(1, -1)


class Full(TorchAttention):
    """What has a copy keeps it: places are not taken again."""

    def store_copies(self, ring, new, k, v):
        before = [copies.clone() for copies in (ring.positions, ring.keys, ring.values)]
        super().store_copies(ring, new, k, v)
        taken = before[0] != EMPTY
        for copies, old in zip((ring.positions, ring.keys, ring.values), before, strict=True):
            copies[taken] = old[taken]


class Swapped(TorchAttention):
    """Copies go to the slots of other requests."""

    def store_copies(self, ring, new, k, v):
        super().store_copies(ring, NewTokens(new.requests.flip(0), new.rows, new.tokens), k, v)


class Torn(TorchAttention):
    """Values are another token's."""

    def store_copies(self, ring, new, k, v):
        super().store_copies(ring, new, k, v.roll(1, 0))


class NoSinks(TorchAttention):
    """First tokens are copied like any others."""

    def store_copies(self, ring, new, k, v):
        window = replace(ring.window, sinks=0)
        super().store_copies(replace(ring, window=window), new, k, v)


class RowsAlone(TorchAttention):
    def decode(self, q, keys, values, indptr, slots, scores, out=None, window=None):
        return super().decode(q, keys, values, indptr, slots, scores, out)


class RowsBehindChunks(TorchAttention):
    def extend(self, q, k, v, keys, values, bounds, scores, out=None, window=None):
        return super().extend(q, k, v, keys, values, bounds, scores, out)


class TooFar(TorchAttention):
    """A chunk reads one token more than its window has."""

    def extend(self, q, k, v, keys, values, bounds, scores, out=None, window=None):
        if window is not None:
            longer = replace(window.ring.window, residual_length=window.ring.window.residual_length + 1)
            near = ExactRing(window.ring.keys, window.ring.values, window.ring.positions, longer)
            window = replace(window, ring=near)
        return super().extend(q, k, v, keys, values, bounds, scores, out, window)


def refused(attention, what):
    try:
        build(attention)
    except ServingError as error:
        assert "the self-test of torch failed" in str(error), error
        assert what in str(error), (attention, error)
        assert f"layer 1, {profile.window}" in str(error), error
    else:
        raise AssertionError(f"the self-test passed with {attention}")


COPIES, READS = "exact copies are not those", "attention does not read the exact copies"
for fault in (Elsewhere, Full, Swapped, Torn, NoSinks):
    refused(fault(), COPIES)
for fault in (RowsAlone, RowsBehindChunks, TooFar):
    refused(fault(), READS)
ExactRings.forget_former_requests = lambda *_: None
refused(TorchAttention(), "a request slot keeps the copies of its former request")
