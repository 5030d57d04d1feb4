"""Run by features/test_speculation.py: the cache of a draft model that takes more than was charged for it."""

from __future__ import annotations

from types import SimpleNamespace

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat.speculation import check_draft_pool

pool = SimpleNamespace(size=31, page_size=1, get_kv_size_bytes=lambda: (32 * 100, 32 * 28))
check_draft_pool(pool, 128)
try:
    check_draft_pool(pool, 127)
except ServingError as error:
    assert "takes 128 bytes per token, but 127 were charged" in str(error)
else:
    raise AssertionError("a draft's cache that nobody charged")
