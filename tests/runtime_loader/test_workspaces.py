"""What attention works in is what the kernels take, on every device of the launch table."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from kvtuner.geometry import ModelGeometry
from kvtuner.precision import ExactWindow
from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader.exact_ring import ExactRing, WindowReads
from kvtuner.runtime_loader.kernels import launch, launch_settings, triton_attention
from kvtuner.runtime_loader.kernels.latents import launch_latents
from kvtuner.runtime_loader.kernels.latents.triton_latents import TritonLatentAttention
from kvtuner.runtime_loader.kernels.launch_settings import Device
from kvtuner.runtime_loader.kernels.scratch import Scratch
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.runtime_loader.workspaces import (
    DECODED_PARTS,
    MOST_PREPARED,
    SPARE_BYTES,
    WORKSPACE_BYTES,
    AttentionShape,
    attention_bytes,
    decode_scratch_bytes,
    new_tokens_bytes,
    slot_table_bytes,
    staged_in_graphs_bytes,
)
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LLAMA = AttentionShape(32, 8, 128, 128, DECODED_PARTS, 8192, 256, context_length=131_072, window_tokens=0)
MOST_PROCESSORS = 160
"""More than the 148 of a B200."""


def test_no_launch_of_any_device_has_more_parts() -> None:
    kinds = (kinds for rows in launch_settings._table().values() for kinds in rows.values())
    settings = {setting for each in kinds for name, setting in each.items() if name != "wide"}
    device = Device("sm_100", MOST_PROCESSORS)
    most = max(
        num_requests * device.splits(setting, num_requests, tiles)
        for setting in settings
        for num_requests in range(1, MOST_PREPARED + 1)
        for tiles in (1, 2, 4, 8)
    )
    assert most <= DECODED_PARTS


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 1), (32, 8), (7, 1)])
def test_what_attention_prepares_is_inside_of_it(
    num_heads: int, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "of", lambda _: Device("sm_90", 132))
    attention = TritonAttention(torch.device("meta"))
    native = RowFormat(num_kv_heads, 128, None)
    rows = PackedRows(torch.empty(9, num_kv_heads, 128, dtype=torch.bfloat16, device="meta"), native)
    attention.prepare([(rows, rows)], num_heads, 10_000)
    taken = attention._scratch._buffer.nbytes
    shape = replace(LLAMA, num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert 0 < taken <= decode_scratch_bytes(shape)


class NoKernel:
    """A kernel whose launches do nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


class WatchedScratch(Scratch):
    """A scratch that notes the most bytes that a call takes of it, and what it has no room for."""

    most = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self._used + dtype.itemsize * math.prod(shape) <= len(self._buffer), "is allocated for the call"
        taken = super().take(shape, dtype)
        WatchedScratch.most = max(WatchedScratch.most, self._used)
        return taken


@pytest.mark.parametrize("processors", [20, 132, MOST_PROCESSORS])
@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("num_heads", [3, 16, 128])
def test_decoding_latents_takes_what_is_reserved_and_no_less(
    num_heads: int, bits: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "of", lambda _: Device("sm_90", processors))
    monkeypatch.setattr(triton_attention, "Scratch", WatchedScratch)
    monkeypatch.setattr(WatchedScratch, "most", 0)
    for module, kernel in (
        (launch, "prepare_queries"), (launch, "attend_copies"), (launch, "merge_splits"),
        (launch_latents, "decode_latents"),
    ):  # fmt: skip
        monkeypatch.setattr(module, kernel, NoKernel())
    centered = Transform(TransformKind.parse("centered"), torch.zeros(1, 512, dtype=torch.float16))
    latents, rotary = (
        PackedRows.zeros(RowFormat(1, size, spec), 9, torch.bfloat16, "meta")
        for size, spec in ((512, QuantSpec(bits, centered) if bits < 16 else None), (64, None))
    )
    attention = TritonLatentAttention(torch.device("meta"))
    attention.prepare([(latents, rotary)], num_heads, 10_000)
    copies = (torch.empty(9, 32, 1, size, dtype=torch.bfloat16, device="meta") for size in (512, 64))
    ring = ExactRing(*copies, torch.empty(9, 32, dtype=torch.int32, device="meta"), ExactWindow(32))
    for num_requests in range(1, MOST_PREPARED + 1):
        q = torch.empty(num_requests, num_heads, 576, dtype=torch.bfloat16, device="meta")
        numbers = torch.empty(num_requests + 1, dtype=torch.int32, device="meta")
        attention.decode(q, latents, rotary, numbers, numbers, ScoreScaling(0.1), window=WindowReads(ring, numbers))
    geometry = ModelGeometry(61, num_heads, 1, 512, 0, rope_dim=64)
    sizes = {
        name: getattr(LLAMA, name) for name in ("chunk_tokens", "graph_requests", "context_length", "window_tokens")
    }
    reserved = decode_scratch_bytes(AttentionShape.of(geometry, tp_size=1, **sizes))
    assert WatchedScratch.most <= attention._scratch._buffer.nbytes <= reserved
    # Native latents have no queries of their own; all others take every byte but the room for alignment.
    queries = num_heads * MOST_PREPARED * (2 * 512 + 4)
    assert WatchedScratch.most >= reserved - (queries if bits == 16 else 0) - SPARE_BYTES


def test_a_chunk_reads_its_prefix_back_or_keeps_parts() -> None:
    kept = decode_scratch_bytes(LLAMA) + slot_table_bytes(LLAMA)
    assert attention_bytes(LLAMA) == WORKSPACE_BYTES + 8192 * 8 * 256 * 2 + kept
    # The parts of a long chunk of a model with many heads, in float32, and its queries in fp16 with their biases.
    many = replace(LLAMA, num_heads=128, window_tokens=32)
    kept = decode_scratch_bytes(many) + slot_table_bytes(many)
    assert attention_bytes(many) == 8192 * 128 * (4 * 129 * 4 + 2 * 128 + 4) + kept
    assert slot_table_bytes(LLAMA) == 256 << 20
    assert slot_table_bytes(replace(LLAMA, graph_requests=0)) == 0


def test_new_tokens_that_are_read_back_as_they_were_stored_count_once_more() -> None:
    """Flash attention reads them among their prefix, in a buffer that they are copied to."""
    of_cache = attention_bytes(replace(LLAMA, attends_cache=True)) - attention_bytes(LLAMA)
    assert of_cache == 8192 * 8 * 256 * 2
    many = replace(LLAMA, num_heads=128, window_tokens=32)  # whose chunks keep parts
    assert attention_bytes(replace(many, attends_cache=True)) - attention_bytes(many) == of_cache


def test_beside_an_index_a_chunk_is_staged_and_a_graph_keeps_pages() -> None:
    """The tensors of a run are compared in tests/sglang/programs/indexed_program.py."""
    latents = replace(LLAMA, num_heads=16, num_kv_heads=1, head_dim=512, v_head_dim=512, rope_dim=64, index_topk=2048)
    kept = decode_scratch_bytes(latents) + 256 * 2048 * 4  # pages of 64 tokens in int32
    places, rows = 8192 * (2048 * 4 + 16), 8192 * 512 * 2
    assert attention_bytes(latents) == WORKSPACE_BYTES + 8192 * 576 * 2 + places + rows + kept
    windowed = replace(latents, window_tokens=32, graph_requests=8)
    assert slot_table_bytes(windowed) == 8 * (2048 + 131_072) * 4
    of_request = (2048 + 32) * 576 * 2
    assert staged_in_graphs_bytes(windowed) == 8 * (of_request + 2048 * 4 + 8) + rows
    kept = decode_scratch_bytes(windowed) + slot_table_bytes(windowed) + staged_in_graphs_bytes(windowed)
    assert attention_bytes(windowed) == WORKSPACE_BYTES + 8192 * 2 * 576 * 2 + places + 1024 * 2048 * 40 + kept
    many = staged_in_graphs_bytes(replace(windowed, graph_requests=256))
    assert WORKSPACE_BYTES // of_request * of_request < many < WORKSPACE_BYTES + 224 * 2048 * 44
    none = replace(windowed, graph_requests=0)
    assert slot_table_bytes(none) == staged_in_graphs_bytes(none) == staged_in_graphs_bytes(latents) == 0


def test_new_latents_count_with_their_rotary_channels_and_not_as_values_too() -> None:
    latents = replace(LLAMA, num_heads=16, num_kv_heads=1, head_dim=512, v_head_dim=512, rope_dim=64)
    assert new_tokens_bytes(latents) == 8192 * (576 + 576) * 2  # joined, and as they were stored
    assert new_tokens_bytes(LLAMA) == 8192 * 8 * 256 * 2
