"""Run by test_launch.py without the interpreter: every way in which servers launch kernels, on GPUs that are not there.

    python launch_program.py '{"archs": [90], "pairs": [[4, 2]], "head_dims": [128], ...}'

A layer of each format is stored, read, decoded, extended and moved in pages; batches of other sizes must not compile
anything anew, since a server compiles before it serves. Prints JSON.
"""

from __future__ import annotations

import collections
import itertools
import json
import sys
from dataclasses import replace
from typing import Any

import fake_gpu
import torch

from kvtuner.precision import ExactWindow, PrecisionPair
from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader.exact_ring import ExactRing, NewTokens, WindowReads
from kvtuner.runtime_loader.host_tier.pages import HostPages, PageLayout
from kvtuner.runtime_loader.host_tier.transfer import DeviceSide, token_bytes
from kvtuner.runtime_loader.joined_chunk import JoinedChunk
from kvtuner.runtime_loader.kernels import triton_attention
from kvtuner.runtime_loader.kernels.latents import triton_latents
from kvtuner.runtime_loader.kernels.latents.triton_latents import TritonLatentAttention
from kvtuner.runtime_loader.kernels.launch_settings import Device
from kvtuner.runtime_loader.kernels.pages.page_mover import TritonMover
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import ChunkMask, ExtendBounds, NewKeys, PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.transforms import TransformKind

SLOTS, PAGE = 96, 16
DTYPE = torch.bfloat16


def side(bits: int, heads: int, head_dim: int, groups: int, kind: str, word_bits: Any, fit: Any) -> RowFormat:
    """The format of rows of one side; constants are ones."""
    if bits == 16:
        return RowFormat(heads, head_dim, None)
    if kind == "per_channel":
        return RowFormat(heads, head_dim, QuantSpec(bits, token_group=32))
    parts, ones = TransformKind.parse(kind), torch.ones(heads, head_dim, dtype=torch.float16)
    transform = Transform(parts, ones if parts.centered else None, ones if parts.balanced else None)
    group_size = None if groups == 1 else head_dim // groups
    return RowFormat(heads, head_dim, QuantSpec(bits, transform, group_size, fit=fit, word_bits=word_bits))


def rows(form: RowFormat) -> PackedRows:
    """Rows of a pool."""
    if form.spec is None:
        return PackedRows(torch.zeros(SLOTS, form.num_heads, form.head_dim, dtype=DTYPE), form)
    return PackedRows(torch.zeros(SLOTS, form.row_bytes(DTYPE), dtype=torch.uint8), form)


def indptr(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Bounds as SGLang has them."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def served(attention: TritonAttention, keys: PackedRows, values: PackedRows, gqa: int, lengths: list[int]) -> None:
    """Serve requests of these lengths in every way."""
    is_latent = isinstance(attention, TritonLatentAttention)
    heads, k_dim, v_dim = keys.format.num_heads, keys.format.head_dim, values.format.head_dim
    q_dim, count = k_dim + v_dim if is_latent else k_dim, len(lengths)
    slots = torch.arange(SLOTS)[: sum(lengths)]
    new = [length % 3 + 1 for length in lengths]

    def states(tokens: int, num_heads: int, channels: int) -> torch.Tensor:
        return torch.zeros(tokens, num_heads, channels, dtype=DTYPE)

    def both(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return states(tokens, heads, k_dim), states(tokens, heads, v_dim)

    is_per_channel = keys.format.token_group > 1
    if is_per_channel:  # as pools do, and their self-tests
        attention.store_side(values, slots, states(len(slots), heads, v_dim))
        whole = torch.arange(keys.format.token_group)
        attention.store(keys, values, whole, *both(len(whole)))
    else:
        attention.store(keys, values, slots, *both(len(slots)))
    ring = ExactRing(
        torch.zeros(8, 36, heads, k_dim, dtype=DTYPE), torch.zeros(8, 36, heads, v_dim, dtype=DTYPE),
        torch.full((8, 36), -1, dtype=torch.int32), ExactWindow(32, 4),
    )  # fmt: skip
    requests = torch.arange(count)
    fresh = both(sum(new))
    bounds = ExtendBounds(indptr(new, torch.int64), indptr(lengths), slots, max(new))
    starts = indptr([many * (past + many) for past, many in zip(lengths, new, strict=True)], torch.int64)
    drafts = replace(bounds, mask=ChunkMask(torch.ones(int(starts[-1]), dtype=torch.bool), starts))
    for cap in (0.0, 30.0):
        scores = ScoreScaling(q_dim**-0.5, cap)
        window = WindowReads(ring, requests)
        for reads in (None, window):
            q = states(count, heads * gqa, q_dim)
            attention.decode(q, keys, values, indptr(lengths), slots, scores, window=reads)
        for reads in (None, window, replace(window, stored=fresh)):
            q = states(sum(new), heads * gqa, q_dim)
            attention.extend(q, *fresh, keys, values, bounds, scores, window=reads)
        attention.extend(q, *fresh, keys, values, drafts, scores)
    if is_per_channel:
        attention.store_groups(keys, ring, NewTokens(requests, indptr(lengths)), slots)
        chunk = NewKeys(torch.arange(sum(new)), fresh[0], max(new))
        attention.store_groups(keys, ring, NewTokens(requests, indptr(lengths), indptr(new, torch.int64)), slots, chunk)
    attention.store_copies(ring, NewTokens(requests, indptr(lengths)), *both(count))
    attention.store_copies(ring, NewTokens(requests, indptr(lengths), indptr(new, torch.int64)), *fresh)
    attention.read(keys, slots, DTYPE)
    attention.read(values, slots, DTYPE)
    q = states(sum(new), heads * gqa, q_dim)
    assert attention.read_prefix(q, keys, values, bounds) is not None
    if not is_latent:  # whose channels SGLang's flash attention does not take
        assert attention.read_prefix(q, keys, values, bounds, JoinedChunk.of(bounds, sum(new))) is not None


def moved(keys: PackedRows, values: PackedRows, num_pages: int) -> None:
    """Move pages of two layers, packed and quantized below."""
    places = torch.arange(num_pages * PAGE)
    for packed in (True, False):
        sides = tuple(
            DeviceSide(
                stored.rows if packed else torch.zeros(SLOTS, *stored.shape[1:], dtype=DTYPE), stored.format, packed
            )
            for stored in (keys, values)
        )
        layers: Any = [sides, sides]
        layout = PageLayout(PAGE, token_bytes(layers), SLOTS // PAGE, "page_first")
        mover = TritonMover(layers, HostPages(layout, torch.zeros(layout.buffer_bytes, dtype=torch.uint8)))
        mover.backup(places, places)
        for layer in (0, 1):
            mover.load(layer, places, places)


asked = json.loads(sys.argv[1])
triton_attention.WORTH_READING, triton_latents.READ_BACK_TOKENS = 0, 1
done: list[dict[str, Any]] = []
for arch in asked["archs"]:
    fake_gpu.use(arch)
    device = Device(f"sm_{arch}", 1)
    Device.of = classmethod(lambda cls, _, device=device: device)  # type: ignore[method-assign,assignment]  # no GPU
    for (k_bits, v_bits), head_dim, groups, (heads, gqa), kind, words, fit in itertools.product(
        asked["pairs"], asked["head_dims"], asked["groups"], asked["heads"], asked["kinds"], asked["words"],
        asked["fits"],
    ):  # fmt: skip
        value_kind = "hadamard" if "hadamard" in kind else "none"
        keys, values = (
            rows(side(bits, heads, head_dim, groups, own, words, fit))
            for bits, own in ((k_bits, kind), (v_bits, value_kind))
        )
        attention = TritonAttention(torch.device("cpu"))
        if asked.get("rotary_dim"):
            values = rows(RowFormat(heads, asked["rotary_dim"], None))
            attention = TritonLatentAttention(torch.device("cpu"))
        attention.prepare([(keys, values)], heads * gqa, 8)
        served(attention, keys, values, gqa, [17, 16, 2])
        are_moved = keys.format.token_group == 1 and not asked.get("rotary_dim")
        if are_moved:
            moved(keys, values, 2)
        before = collections.Counter(fake_gpu.LAUNCHED.compiled)
        for lengths in ([1], [33, 1], [5, 7, 16, 3, 8]):
            served(attention, keys, values, gqa, lengths)
        for num_pages in (1, 5) if are_moved else ():
            moved(keys, values, num_pages)
        anew = fake_gpu.LAUNCHED.compiled - before
        case = f"sm_{arch} {PrecisionPair(k_bits, v_bits)} {heads}x{gqa}x{head_dim} {groups} {kind} {words} {fit}"
        done.append({"case": case, "anew": dict(anew)})
sys.stdout.write(
    json.dumps({
        "cases": done, "launches": dict(fake_gpu.LAUNCHED.counts), "compiled": dict(fake_gpu.LAUNCHED.compiled)
    }) + "\n"
)  # fmt: skip
