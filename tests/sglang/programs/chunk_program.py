"""Run by test_chunks.py in a process of its own: the token slots that a graph of decodes reads in its chunks."""

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache import kv_index_translator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvtuner.runtime_loader.sglang.attention.packed_attention_backend import PackedAttnBackend
from kvtuner.runtime_loader.sglang.attention.windows_and_chunks import WindowsAndChunks

SIZE, REQUESTS, LONGEST = 24, 5, 80

kv_index_translator.get_parallel = lambda: None
table = torch.randperm(REQUESTS * LONGEST, generator=torch.Generator().manual_seed(3)).int().view(REQUESTS, LONGEST)
pool = SWAKVPool.__new__(SWAKVPool)
pool.full_to_swa_index_mapping = torch.arange(REQUESTS * LONGEST) * 2 + 1
backend = PackedAttnBackend.__new__(PackedAttnBackend)
backend._others, backend.token_to_kv_pool = WindowsAndChunks(backend, SIZE, owns_masks=False), pool
backend.kv_index_translator = kv_index_translator.KVIndexTranslator(
    req_to_token=table, token_to_kv_pool_allocator=None, token_to_kv_pool=pool, page_size=1, device="cpu"
)
backend.window_kv_indptr = torch.zeros(REQUESTS + 1, dtype=torch.int32)
backend.cuda_graph_window_kv_indices = torch.full((REQUESTS * SIZE,), -1)
TritonAttnBackend._update_decode_kv_buffers = lambda self, plan, bs, lengths, requests: (None, None, None, lengths)

# A graph is replayed with other lengths, and with a batch that is smaller than its buffers.
for lengths, requests in (([1, 24, 25, 48, 79], [4, 2, 0, 1, 3]), ([49, 23, 1], [3, 0, 2])):
    ends = torch.tensor(lengths)
    _, bounds, counts, _ = backend._update_decode_kv_buffers(None, len(ends), ends, torch.tensor(requests))
    assert bounds.data_ptr() == backend.window_kv_indptr.data_ptr()
    bounds = bounds.tolist()
    assert torch.tensor(bounds).diff().equal(counts)
    for place, (length, request) in enumerate(zip(lengths, requests, strict=True)):
        own = [token for token in range(length) if token // SIZE == (length - 1) // SIZE]
        expected = [int(table[request, token]) * 2 + 1 for token in own]
        slots = backend.cuda_graph_window_kv_indices[bounds[place] : bounds[place + 1]]
        assert slots.tolist() == expected, (length, request)
