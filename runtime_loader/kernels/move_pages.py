"""Pages of packed rows between a device and pinned host memory, as bytes: a launch for all layers or for one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_pages(
    spans_ptr, host_pages_ptr, device_pages_ptr, device_ptr, host_ptr, first_span,
    TO_HOST: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One span (a layer's keys or values) of one page: 8-byte words, two to a lane.

    A span is how far its first page lies from a pointer of the device, how far the next one, the same on the host, and
    its length, all in units of two words, so that the compiler knows what they are multiples of.
    """
    page = tl.program_id(0)
    span = spans_ptr + (first_span + tl.program_id(1)) * FIELDS
    device = tl.load(span) + tl.load(device_pages_ptr + page).to(tl.int64) * tl.load(span + 1)
    host = tl.load(span + 2) + tl.load(host_pages_ptr + page).to(tl.int64) * tl.load(span + 3)
    device_page, host_page = device_ptr + 2 * device, host_ptr + 2 * host
    words = 2 * tl.load(span + 4)
    for start in range(0, words, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        live = offsets < words
        if TO_HOST:
            tl.store(host_page + offsets, tl.load(device_page + offsets, mask=live), mask=live)
        else:
            tl.store(device_page + offsets, tl.load(host_page + offsets, mask=live), mask=live)
