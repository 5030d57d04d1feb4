"""Run by test_pool.py in a process of its own: a packed pool without a server, moved and copied in every way."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

from kvtuner.errors import ServingError
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.runtime_loader.sglang.compat.parallel import ParallelRanks
from kvtuner.runtime_loader.sglang.pools import packed_pool as pool_module
from kvtuner.runtime_loader.sglang.pools.dense_pool import PackedKVPool
from kvtuner.runtime_loader.sglang.process_state import RankState, process_state
from kvtuner.runtime_loader.torch_attention import TorchAttention

START, STOP, SIZE, PAGE = 1, 4, 48, int(sys.argv[2])

profile = load_profile(sys.argv[1])
process_state().rank = RankState(profile, "fresh", TorchAttention(), gqa=2, logit_cap=2.0)
pool_module.ranks = lambda: ParallelRanks(tp_rank=1, tp_size=2, pp_rank=0, world_rank=1)
pool_module.announce = lambda *_: None
pool = PackedKVPool(
    SIZE, page_size=PAGE, dtype=torch.bfloat16, head_num=1, head_dim=16, layer_num=STOP - START, device="cpu",
    enable_memory_saver=False, start_layer=START, end_layer=STOP,
)  # fmt: skip

# Bytes: the formula's on one of two ranks, for every slot and the padding page.
shape = profile.row_shape(2)
expected = sum(shape.pair_bytes(pair) for pair in profile.pairs[START:STOP]) * (SIZE + PAGE)
assert sum(pool.get_kv_size_bytes()) == expected, (pool.get_kv_size_bytes(), expected)
assert pool.dtype == torch.uint8
pointers, lengths, items = pool.get_contiguous_buf_infos()
assert pointers == [rows.data_ptr() for rows in (*pool.k_buffer, *pool.v_buffer)]
assert lengths == [rows.nbytes for rows in (*pool.k_buffer, *pool.v_buffer)]
assert items == [rows[:PAGE].nbytes for rows in (*pool.k_buffer, *pool.v_buffer)]
assert pool.data_strides.tolist() == [rows[0].nbytes for rows in (*pool.k_buffer, *pool.v_buffer)]

generator = torch.Generator().manual_seed(0)
slots = torch.randperm(SIZE, generator=generator)[:20] + PAGE
for layer_id in range(START, STOP):
    k, v = (torch.randn(20, 1, 16, generator=generator).bfloat16() for _ in range(2))
    pool.set_kv_buffer(SimpleNamespace(layer_id=layer_id), slots, k.view(20, -1), v)
    for side, stored, fresh in (("k", pool.get_key_buffer(layer_id), k), ("v", pool.get_value_buffer(layer_id), v)):
        # The second of two ranks: the second head, by that head's own constants.
        spec = profile.quant_spec(layer_id, side)
        both = torch.cat((torch.zeros_like(fresh), fresh), dim=1)
        wanted = both if spec is None else spec.simulate(both)
        assert torch.equal(stored.read(slots, torch.float32), wanted[:, 1:].float()), (layer_id, side)
before = [rows.clone() for rows in (*pool.k_buffer, *pool.v_buffer)]
assert all(rows.any() for rows in before)

# Rows move with their scales.
targets = torch.tensor([slot for slot in range(PAGE, PAGE + SIZE) if slot not in set(slots.tolist())])[:20]
pool.move_kv_cache(targets, slots)
for rows, old in zip((*pool.k_buffer, *pool.v_buffer), before, strict=True):
    assert torch.equal(rows[targets], old[slots])
copy = pool.get_cpu_copy(slots)
for rows in (*pool.k_buffer, *pool.v_buffer):
    rows.zero_()
pool.load_cpu_copy(copy, targets)
for rows, old in zip((*pool.k_buffer, *pool.v_buffer), before, strict=True):
    assert torch.equal(rows[targets], old[slots])

# What would read rows as keys, or lose them, is refused.
for call in (pool.get_device_pool_infos, pool.set_kv_buffer_prefix_valid):
    try:
        call()
    except ServingError:
        pass
    else:
        raise AssertionError(call)


# An implementation that stores something else is found out at start.
class Wrong(TorchAttention):
    def store(self, keys, values, slots, k, v):
        super().store(keys, values, slots, k, v)
        keys.rows[slots[0], 0] ^= 1


class Deaf(TorchAttention):
    def decode(self, q, keys, values, indptr, slots, scores):
        return super().decode(0 * q, keys, values, indptr, slots, scores)


class Blind(TorchAttention):
    def extend(self, q, k, v, keys, values, bounds, scores):
        none = replace(bounds, prefix=0 * bounds.prefix)
        return super().extend(q, k, v, keys, values, none, scores)


class Boundless(TorchAttention):
    def decode(self, q, keys, values, indptr, slots, scores):
        return super().decode(q, keys, values, indptr, slots, replace(scores, logit_cap=0.0))


class Mistaken(TorchAttention):
    def read_prefix(self, q, keys, values, bounds):
        return tuple(stored.read(bounds.slots, q.dtype).roll(1, 0) for stored in (keys, values))


class Late(TorchAttention):
    def read(self, stored, slots, dtype):
        return super().read(stored, slots.roll(1), dtype)


READERS = (Deaf, Blind, Boundless, Mistaken, Late)
for wrong, what in ((Wrong, "keys of layer 1"), *((each, "attention of layer 1") for each in READERS)):
    process_state().rank = RankState(profile, "fresh", wrong(), gqa=2, logit_cap=2.0)
    try:
        PackedKVPool(
            SIZE, page_size=PAGE, dtype=torch.bfloat16, head_num=1, head_dim=16, layer_num=2, device="cpu",
            enable_memory_saver=False, start_layer=START, end_layer=3,
        )  # fmt: skip
    except ServingError as error:
        assert "self-test" in str(error) and what in str(error), error
    else:
        raise AssertionError(f"the self-test passed with {wrong}")
