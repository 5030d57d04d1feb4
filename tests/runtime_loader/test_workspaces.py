"""What attention works in is what the kernels take, on every device of the launch table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvtuner.geometry import ModelGeometry
from kvtuner.runtime_loader.kernels import launch_settings
from kvtuner.runtime_loader.kernels.latents.triton_latents import TritonLatentAttention
from kvtuner.runtime_loader.kernels.launch_settings import Device
from kvtuner.runtime_loader.kernels.triton_attention import TritonAttention
from kvtuner.runtime_loader.packed_attention import PackedRows
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.runtime_loader.workspaces import (
    DECODED_PARTS,
    MOST_PREPARED,
    WORKSPACE_BYTES,
    AttentionShape,
    attention_bytes,
    decode_scratch_bytes,
    slot_table_bytes,
)

LLAMA = AttentionShape(32, 8, 128, 128, chunk_tokens=8192, graph_requests=256, context_length=131_072, has_window=False)
MOST_PROCESSORS = 160
"""More than the 148 of a B200."""


def test_no_launch_of_any_device_has_more_parts() -> None:
    settings = (kinds for rows in launch_settings._table().values() for kinds in rows.values())
    launches = {launch for kinds in settings for name, launch in kinds.items() if name != "wide"}
    device = Device("sm_100", MOST_PROCESSORS)
    most = max(
        num_requests * device.splits(launch, num_requests, tiles)
        for launch in launches
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


def test_what_attention_over_latents_prepares_is_inside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "of", lambda _: Device("sm_90", 132))
    attention = TritonLatentAttention(torch.device("meta"))
    latents, rotary = (
        PackedRows(torch.empty(9, 1, size, dtype=torch.bfloat16, device="meta"), RowFormat(1, size, None))
        for size in (512, 64)
    )
    attention.prepare([(latents, rotary)], 16, 10_000)
    geometry = ModelGeometry(61, 128, 1, 512, 0, rope_dim=64)
    sizes = {name: getattr(LLAMA, name) for name in ("chunk_tokens", "graph_requests", "context_length", "has_window")}
    shape = AttentionShape.of(geometry, tp_size=8, **sizes)
    assert (shape.num_heads, shape.v_head_dim) == (16, 512)
    assert 0 < attention._scratch._buffer.nbytes <= decode_scratch_bytes(shape)


def test_a_chunk_reads_its_prefix_back_or_keeps_parts() -> None:
    kept = decode_scratch_bytes(LLAMA) + slot_table_bytes(LLAMA)
    assert attention_bytes(LLAMA) == WORKSPACE_BYTES + 8192 * 8 * 256 * 2 + kept
    # The parts of a long chunk of a model with many heads, in float32, and its queries in fp16 with their biases.
    many = replace(LLAMA, num_heads=128, has_window=True)
    kept = decode_scratch_bytes(many) + slot_table_bytes(many)
    assert attention_bytes(many) == 8192 * 128 * (4 * 129 * 4 + 2 * 128 + 4) + kept
    assert slot_table_bytes(LLAMA) == 256 << 20
    assert slot_table_bytes(replace(LLAMA, graph_requests=0)) == 0
