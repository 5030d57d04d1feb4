"""Run by test_pool.py in a process of its own: a pool of latents without a server, written, read and moved."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

from kvtuner.errors import ServingError
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.runtime_loader.cpu.latent_attention import LatentAttention
from kvtuner.runtime_loader.sglang.compat.parallel import ParallelRanks
from kvtuner.runtime_loader.sglang.pools import packed_pool as pool_module
from kvtuner.runtime_loader.sglang.pools.latent_pool import PackedLatentPool
from kvtuner.runtime_loader.sglang.process_state import RankState, process_state

START, STOP, SIZE, PAGE, HEADS = 1, 4, 48, int(sys.argv[2]), 2

profile = load_profile(sys.argv[1])
geometry = profile.tuned_geometry()
RANK, ROPE = geometry.head_dim, geometry.rope_dim
pool_module.ranks = lambda: ParallelRanks(tp_rank=1, tp_size=2, pp_rank=0, world_rank=1)
pool_module.announce = lambda *_: None


def pool_of(attention, rank=RANK):
    process_state().rank = RankState(profile, "fresh", attention, gqa=HEADS, logit_cap=0.0)
    return PackedLatentPool(
        SIZE, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=rank, qk_rope_head_dim=ROPE, layer_num=STOP - START,
        device="cpu", enable_memory_saver=False, start_layer=START, end_layer=STOP,
    )  # fmt: skip


# Bytes: the formula's, of whole latents on each of two ranks, for every slot and the padding page.
pool = pool_of(LatentAttention())
shape = profile.row_shape(2)
expected = sum(shape.pair_bytes(pair) for pair in profile.pairs[START:STOP])
assert pool.get_kv_size_bytes() == expected * (SIZE + PAGE), (pool.get_kv_size_bytes(), expected)
assert pool.bytes_per_token == (expected, 2 * (STOP - START) * (RANK + ROPE))
assert pool.dtype == torch.uint8

# Both of SGLang's writers store what the profile's quantizer gives, and rotary channels as they are.
generator = torch.Generator().manual_seed(0)
slots = torch.randperm(SIZE, generator=generator)[:20] + PAGE
for layer_id in range(START, STOP):
    latents, rotary = (torch.randn(20, 1, n, generator=generator).bfloat16() for n in (RANK, ROPE))
    spec, layer = profile.quant_spec(layer_id, "k"), SimpleNamespace(layer_id=layer_id)
    wanted = latents if spec is None else spec.simulate(latents)
    pool.set_kv_buffer(layer, slots[:10], torch.cat((latents, rotary), dim=-1)[:10], latents[:10])
    pool.set_mla_kv_buffer(layer, slots[10:], latents[10:], rotary[10:])
    assert torch.equal(pool.get_key_buffer(layer_id).read(slots, torch.float32), wanted.float()), layer_id
    assert torch.equal(pool.get_value_buffer(layer_id).read(slots, torch.float32), rotary.float()), layer_id
    for found, right in zip(pool.get_mla_kv_buffer(layer, slots, torch.float32), (wanted, rotary), strict=True):
        assert torch.equal(found, right.float()), layer_id

# Rows move with their scales, and with their rotary channels.
before = [rows[slots].clone() for rows in pool.kv_buffer]
targets = torch.tensor([slot for slot in range(PAGE, PAGE + SIZE) if slot not in set(slots.tolist())])[:20]
pool.move_kv_cache(targets, slots)
assert len(before) == 2 * (STOP - START)
for rows, old in zip(pool.kv_buffer, before, strict=True):
    assert torch.equal(rows[targets], old) and old.any()


def refusal(call):
    try:
        call()
    except ServingError as error:
        return str(error)
    raise AssertionError(call)


# What would read latents otherwise, or leave a part of them behind, is refused.
for call in (pool.get_device_pool_infos, pool.get_contiguous_buf_infos, lambda: pool.get_cpu_copy(slots)):
    refusal(call)
assert f"1 KV heads of {RANK + 16} and {ROPE} channels" in refusal(lambda: pool_of(LatentAttention(), RANK + 16))


# An implementation that stores or reads something else is found out at start.
class Wrong(LatentAttention):
    def store(self, keys, values, slots, k, v):
        super().store(keys, values, slots, k, v)
        values.rows[slots[0], 0, 0] += 1


class WithoutRotaryChannels(LatentAttention):
    def decode(self, q, *arguments):
        return super().decode(torch.cat((q[..., :RANK], 0 * q[..., RANK:]), dim=-1), *arguments)


class WithoutPrefix(LatentAttention):
    def extend(self, q, k, v, keys, values, bounds, scores):
        none = replace(bounds, prefix=0 * bounds.prefix)
        return super().extend(q, k, v, keys, values, none, scores)


assert "values of layer 1 are not stored" in refusal(lambda: pool_of(Wrong()))
for wrong in (WithoutRotaryChannels, WithoutPrefix):
    assert "attention of layer 1 is not attention over" in refusal(lambda wrong=wrong: pool_of(wrong())), wrong
