"""The kernel that copies pages of bytes between a device and host memory. Knows nothing of what bytes hold."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first_span", "num_spans", "num_pages"])
def copy_pages(
    spans_ptr, host_pages_ptr, device_pages_ptr, device_ptr, host_ptr, first_span, num_spans, num_pages,
    TO_HOST: tl.constexpr, FIELDS: tl.constexpr, PAGES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Copy spans (a layer's keys or values) of pages in 8-byte words, two to a lane, by any number of programs.

    A span is how far its first page lies from a pointer of the device, how far the next one, the same on the host, and
    its length, all in units of two words, so that the compiler knows what they are multiples of.
    """
    # A few programs take turns: while they wait for the bus, they leave the device to whoever decodes.
    offsets = tl.arange(0, WORDS)[None, :]  # [1, WORDS]
    num_tiles = tl.cdiv(num_pages, PAGES) * num_spans
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        pages = tile // num_spans * PAGES + tl.arange(0, PAGES)  # [PAGES]
        mask_pages = pages < num_pages  # [PAGES]
        span = spans_ptr + (first_span + tile % num_spans) * FIELDS
        device_pages = tl.load(device_pages_ptr + pages, mask=mask_pages, other=0).to(tl.int64)  # [PAGES]
        host_pages = tl.load(host_pages_ptr + pages, mask=mask_pages, other=0).to(tl.int64)  # [PAGES]
        device = device_ptr + 2 * (tl.load(span) + device_pages * tl.load(span + 1))[:, None]  # [PAGES, 1]
        host = host_ptr + 2 * (tl.load(span + 2) + host_pages * tl.load(span + 3))[:, None]  # [PAGES, 1]
        words = 2 * tl.load(span + 4)
        for start in range(0, words, WORDS):
            places = start + offsets  # [1, WORDS]
            mask = mask_pages[:, None] & (places < words)  # [PAGES, WORDS]
            if TO_HOST:
                tl.store(host + places, tl.load(device + places, mask=mask), mask=mask)
            else:
                tl.store(device + places, tl.load(host + places, mask=mask), mask=mask)
