"""Run by test_images.py in a process of its own: what SGLang's kernel reads by a mask of images."""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

from kvtuner.runtime_loader.packed_attention import ChunkMask, ExtendBounds
from kvtuner.runtime_loader.sglang.attention.windows_and_chunks import WindowsAndChunks

Requests = list[tuple[int, int, range]]
WINDOW, CHANNELS, SLOTS = 5, 16, 60
SHORT: Requests = [(9, 6, range(11, 14)), (0, 4, range(1, 3)), (4, 3, range(0)), (3, 1, range(0)), (2, 9, range(5, 10))]
"""Tokens that are there, new ones, and those of an image, among all of a request: as many as a window at most."""
LONG: Requests = [*SHORT, (30, 19, range(31, 43))]


def reads(query: int, token: int, image: range) -> bool:
    return token <= query or (query in image and token in image)


def draw(count: int) -> torch.Tensor:
    return torch.randn(count, 1, CHANNELS, generator=generator)


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def compare(requests: Requests, *, owns_masks: bool) -> None:
    """Compare SGLang's kernel, as it is called for a layer with a window, with attention in float64."""
    prefixes, lengths = [prefix for prefix, _, _ in requests], [length for _, length, _ in requests]
    near = [min(prefix, WINDOW - 1) for prefix in prefixes]  # what SGLang lists for a window
    new = sum(lengths)
    q, k, v, cached_k, cached_v = (draw(count) for count in (new, new, new, SLOTS, SLOTS))
    slots = torch.randperm(SLOTS, generator=generator)[: sum(near)]
    seen = [
        reads(query, token, image)
        for prefix, length, image in requests
        for query in range(prefix, prefix + length)
        for token in range(prefix + length)
    ]
    mask = torch.tensor(seen)
    starts = bounds_of([length * (prefix + length) for prefix, length, _ in requests])
    backend: Any = None  # whose slots are those of windows
    layers = WindowsAndChunks(backend, chunk=None, owns_masks=owns_masks)
    layers.begin(SimpleNamespace(extend_prefix_lens_cpu=prefixes, extend_seq_lens_cpu=lengths))
    given = ExtendBounds(bounds_of(lengths), bounds_of(near), slots, max(lengths), ChunkMask(mask, starts))
    for _ in range(2):  # layers
        read, options = layers.of_extend(given, WINDOW)
        assert read.mask is not None
        assert read.mask.mask.data_ptr() == mask.data_ptr(), "another mask of all tokens takes memory"
        assert owns_masks or mask.tolist() == seen
        offsets = torch.tensor(prefixes) - torch.tensor(near)
        cuts = {"sliding_window_size": WINDOW - 1, "window_kv_offsets": offsets, **options}
        found = torch.empty_like(q)
        extend_attention_fwd(
            q, k, v, found, cached_k, cached_v, read.tokens, read.prefix, read.slots, read.mask.mask, False,
            read.mask.starts, read.longest, 1.0, 1.0, sm_scale=CHANNELS**-0.5, **cuts,
        )  # fmt: skip
    for request, (prefix, length, image) in enumerate(requests):
        own = slice(*read.tokens[request : request + 2].tolist())
        there = slots[slice(*read.prefix[request : request + 2].tolist())]
        keys, values = (
            torch.cat(states)[:, 0].double() for states in ((cached_k[there], k[own]), (cached_v[there], v[own]))
        )
        queries = range(prefix, prefix + length)
        tokens = range(prefix - near[request], prefix + length)
        near_ones = [[reads(query, token, image) and token > query - WINDOW for token in tokens] for query in queries]
        scores = (q[own][:, 0].double() @ keys.T * CHANNELS**-0.5).masked_fill(~torch.tensor(near_ones), -torch.inf)
        wanted = scores.softmax(-1) @ values
        # Sums of at most 24 products in float32, of values of some units.
        assert (found[own][:, 0] - wanted).abs().max() < 1e-5, (request, owns_masks)


generator = torch.Generator().manual_seed(0)
compare(LONG, owns_masks=True)
compare(SHORT, owns_masks=False)
