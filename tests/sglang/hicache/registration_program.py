"""Run by test_host_pool.py in a process of its own: which pieces of a large host pool SGLang registers with CUDA.

CUDA's runtime is replaced by one that writes down what it is asked; memory is only reserved.
"""

from __future__ import annotations

import mmap
import os
from types import SimpleNamespace

os.environ["SGLANG_HICACHE_HOST_REGISTER_CHUNK_GB"] = "1"

import torch
from sglang.srt.mem_cache.pool_host.common import HostTensorAllocator

from kvtuner.runtime_loader.sglang.compat.hierarchical_cache import allocate

RECORD = 3 * 2**18 + 16
"""The bytes of a record, whose multiples end in the midst of the system's pages."""
NUM_RECORDS = 4000
registered: list[tuple[int, int]] = []
runtime = SimpleNamespace(
    cudaHostRegister=lambda pointer, size, flags: registered.append((pointer, size)) or 0, cudaGetErrorString=str
)
torch.cuda.cudart = lambda: runtime
pool = SimpleNamespace(pin_memory=True, allocator=HostTensorAllocator())
buffer = allocate(pool, NUM_RECORDS * RECORD, torch.device("cuda"), RECORD)
assert buffer.numel() == NUM_RECORDS * RECORD and buffer.dtype == torch.uint8
ends = [buffer.data_ptr()]
for pointer, size in registered:
    assert pointer == ends[-1] and 0 < size <= 2**30
    ends.append(pointer + size)
assert ends[-1] == buffer.data_ptr() + buffer.numel()
assert len(registered) >= 3
for end in ends[:-1]:  # no piece begins inside of a record, or of a page that another one has
    assert (end - buffer.data_ptr()) % RECORD == 0
    assert end % mmap.PAGESIZE == 0
