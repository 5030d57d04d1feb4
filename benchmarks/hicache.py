"""Bytes and times of a quantized host tier, beside SGLang's unquantized host pool in the same run.

    PYTHONPATH=examples/sglang_on_cpu python benchmarks/hicache.py           # transfers, on a processor or a GPU
    PYTHONPATH=examples/sglang_on_cpu python benchmarks/hicache.py --serve   # and time to first token, of real servers

Transfers: pages of a model's shape go from device to host and back, by SGLang's `MHATokenToKVPoolHost` and by ours over
a packed and an unquantized device pool; bytes, seconds, and ratios to SGLang's. On a GPU both use their kernels and
pinned memory, and the copy bandwidth is measured beside them; on a processor SGLang's copy, which is CUDA code, is
replaced by the same copy of pages in torch. With --serve, the demo model answers prompts whose prefix lies on the
device, in host memory, in storage, or nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from gpu_parts.pools import ALL_TRANSFORMS, QWEN, empty_rows, row_format, value_kind
from torch.utils.benchmark import Timer

from kvtuner.precision import PrecisionPair
from kvtuner.report.table import Table
from kvtuner.runtime_loader.host_tier.pages import HostPages, PageLayout
from kvtuner.runtime_loader.host_tier.stored_page import HEADER_BYTES, fault_of, identity_digest, seal
from kvtuner.runtime_loader.host_tier.transfer import DeviceSide, TorchMover, token_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Move = Callable[[Tensor, Tensor], object]
    """A transfer between slots of the host and slots of the device."""
    HostTier = tuple[int, Move, Move]
    """The bytes of a token in a host tier, its backup and its load."""

LAYERS: Final = 28
PAIRS: Final = tuple(PrecisionPair.parse(name) for name in ("K8V8", "K8V4", "K4V4", "K4V2"))
KINDS: Final = {"plain": "none", "all transforms": ALL_TRANSFORMS}
DIRECTIONS: Final = ("backup", "load")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    results: dict[str, Any] = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "machine": f"{name}, {os.cpu_count()} processors, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "tokens": args.tokens,
        "page_size": args.page_size,
        "transfers": transfers(device, args.tokens, args.page_size, args.repeats),
        "storage": storage(args.page_size, args.repeats),
    }
    show(results)
    if args.serve:
        from serving_parts import hicache_serving

        results["time_to_first_token"] = hicache_serving.first_tokens(args.repeats)
        hicache_serving.show(results["time_to_first_token"])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


def transfers(device: torch.device, tokens: int, page_size: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each host tier, SGLang's first: bytes and times of both directions, and their ratios to SGLang's."""
    pages = tokens // page_size
    slots = torch.arange(pages * page_size).view(pages, page_size)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    device_slots, host_slots = slots[order].flatten(), slots[order.flip(0)].flatten()
    rows: list[dict[str, Any]] = []
    for name, (token_size, *moves) in host_tiers(device, tokens, page_size).items():
        row: dict[str, Any] = {"way": name, "bytes_per_token": token_size}
        base = rows[0] if rows else row
        for direction, move in zip(DIRECTIONS, moves, strict=True):
            seconds = timed(partial(move, host_slots, device_slots), repeats)
            row |= {f"{direction}_{unit}": value for unit, value in speed(seconds, token_size * tokens).items()}
            row[f"{direction}_time_ratio"] = round(row[f"{direction}_ms"] / base[f"{direction}_ms"], 2)
        row["bytes_ratio"] = round(token_size / base["bytes_per_token"], 3)
        rows.append(row)
    return [*rows, copy_bandwidth(repeats)] if device.type == "cuda" else rows


def speed(seconds: float, num_bytes: int) -> dict[str, float]:
    """The milliseconds of a transfer, and its gigabytes per second."""
    return {"ms": round(1000 * seconds, 2), "gb_per_s": round(num_bytes / seconds / 1e9, 2)}


def host_tiers(device: torch.device, tokens: int, page_size: int) -> dict[str, HostTier]:
    """Every host tier by its name."""
    stock_name = "SGLang, bf16" if device.type == "cuda" else "SGLang, bf16, its copy in torch"
    tiers = {stock_name: stock(device, tokens, page_size)}
    for name, kind in KINDS.items():
        for pair in PAIRS:
            if name == "plain":  # transforms change what packed bytes mean, not how many there are
                tiers[f"{pair}, packed device pool"] = ours(device, tokens, page_size, pair, kind, packed=True)
            tiers[f"{pair}, quantized below, {name}"] = ours(device, tokens, page_size, pair, kind, packed=False)
    return tiers


def stock(device: torch.device, tokens: int, page_size: int) -> HostTier:
    """SGLang's own host pool over its own device pool."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host import mha

    pool = MHATokenToKVPool(
        tokens, page_size=page_size, dtype=torch.bfloat16, head_num=QWEN.num_kv_heads, head_dim=QWEN.head_dim,
        layer_num=LAYERS, device=device.type, enable_memory_saver=False,
    )  # fmt: skip
    on_gpu = device.type == "cuda"
    layout, backend = ("page_first", "kernel") if on_gpu else ("layer_first", "direct")
    if not on_gpu:
        mha.transfer_kv_direct = copy_in_torch
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS, alloc_with_host_register

        ALLOC_MEMORY_FUNCS["cpu"] = alloc_with_host_register
    host = mha.MHATokenToKVPoolHost(
        pool.get_device_pool_infos()[0].buffer_info, 1.0, 0, page_size, layout, pin_memory=on_gpu,
        device_capacity_tokens=tokens, start_layer=0, end_layer=LAYERS,
    )  # fmt: skip
    staged = host.can_use_write_back_jit

    def down(host_slots: Tensor, device_slots: Tensor) -> None:
        at_host = host_slots if staged or not on_gpu else host_slots.to(device)
        host.backup_from_device_all_layer(pool, at_host, device_slots.to(device), backend)

    def up(host_slots: Tensor, device_slots: Tensor) -> None:
        at_host, at_device = host_slots.to(device), device_slots.to(device)
        for layer in range(LAYERS):
            host.load_to_device_per_layer(pool, at_host, at_device, layer, backend)

    return host.size_per_token, down, up


def copy_in_torch(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Copy pages as SGLang's CUDA operator does, on a processor."""
    sources, targets = src_indices[::page_size] // page_size, dst_indices[::page_size] // page_size
    for layers in zip(src_layers, dst_layers, strict=True):
        source_pages, target_pages = (layer.view(len(layer) // page_size, -1).view(torch.int64) for layer in layers)
        target_pages[targets] = source_pages[sources]


def ours(
    device: torch.device, tokens: int, page_size: int, pair: PrecisionPair, kind: str, *, packed: bool
) -> HostTier:
    """Our host tier, over packed rows or states in bf16 on the device."""
    generator = torch.Generator().manual_seed(0)
    num_slots = tokens + page_size

    def side(bits: int, kind: str) -> DeviceSide:
        row = row_format(QWEN, bits, kind)
        if packed:
            rows = empty_rows("cpu", torch.bfloat16, row, num_slots).rows
            return DeviceSide(rows.random_(256, generator=generator).to(device), row, packed)
        states = torch.randn(num_slots, QWEN.num_kv_heads, QWEN.head_dim, generator=generator)
        return DeviceSide(states.bfloat16().to(device), row, packed)

    layers = [(side(pair.k_bits, kind), side(pair.v_bits, value_kind(kind))) for _ in range(LAYERS)]
    layout = PageLayout(page_size, token_bytes(layers), tokens // page_size + 1, "page_first")
    pages = HostPages(layout, torch.zeros(layout.buffer_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"))
    mover: Any = TorchMover(layers, pages)
    if device.type == "cuda":
        from kvtuner.runtime_loader.kernels.pages.page_mover import TritonMover

        mover = TritonMover(layers, pages)

    def up(host_slots: Tensor, device_slots: Tensor) -> None:
        at_host, at_device = mover.place(host_slots), mover.place(device_slots)
        for layer in range(LAYERS):
            mover.load(layer, at_host, at_device)

    check(mover, pages, layers)
    return layout.token_bytes, lambda host, own: mover.backup(mover.place(host), mover.place(own)), up


def check(mover: TorchMover, pages: HostPages, layers: list[tuple[DeviceSide, DeviceSide]]) -> None:
    """Move one page down and up, and compare both with `quant.py`; a tier that is wrong ends the program."""
    page_size = pages.layout.page_size
    slots = mover.place(torch.arange(page_size))
    mover.backup(slots, slots)
    for layer, sides in enumerate(layers):
        is_right, loaded = True, []
        for index, side in enumerate(sides):
            before = side.buffer[:page_size].cpu()
            rows = before.view(page_size, -1) if side.packed else side.format.pack(before)
            loaded.append(before.clone() if side.packed else side.format.unpack(rows, before.dtype))
            if side.buffer.is_cuda:
                torch.cuda.synchronize()
            is_right &= torch.equal(pages.rows(layer, index)[0], rows)
        mover.load(layer, slots, slots)  # both sides: what is read back is quantized, and packs otherwise
        is_right &= all(torch.equal(side.buffer[:page_size].cpu(), x) for side, x in zip(sides, loaded, strict=True))
        if not is_right:
            raise SystemExit(f"layer {layer} is not what quant.py makes of it: nothing is timed")


def timed(move: Callable[[], object], repeats: int) -> float:
    """The median seconds of a transfer, each after two that are not counted; the timer waits for a GPU."""
    timer = Timer("move()", globals={"move": move}, num_threads=torch.get_num_threads())
    return statistics.median(timer.timeit(1).mean for _ in range(repeats))


def copy_bandwidth(repeats: int) -> dict[str, Any]:
    """The row of one large copy in each direction, which shows what the bus gives."""
    size, device = 1 << 28, torch.device("cuda")
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    row: dict[str, Any] = {"way": "one copy of 256 MiB"}
    for direction, move in zip(DIRECTIONS, (lambda: host.copy_(there), lambda: there.copy_(host)), strict=True):
        seconds = timed(move, repeats)
        row |= {f"{direction}_{unit}": value for unit, value in speed(seconds, size).items()}
    return row


def storage(page_size: int, repeats: int) -> dict[str, float]:
    """The GB/s at which one core seals and checks a page of K4V4."""
    page_bytes = page_size * LAYERS * 2 * QWEN.num_kv_heads * (QWEN.head_dim // 2 + 4)
    stored = torch.randint(256, (HEADER_BYTES + page_bytes,), dtype=torch.uint8)
    identity, key = identity_digest({}), "0" * 64
    sealing = timed(lambda: seal(stored, identity, key), 20 * repeats)
    checking = timed(lambda: fault_of(stored, identity, key), 20 * repeats)
    return {
        "page_bytes": page_bytes,
        "header_share": round(HEADER_BYTES / page_bytes, 5),
        "seal_gb_per_s": round(page_bytes / sealing / 1e9, 1),
        "check_gb_per_s": round(page_bytes / checking / 1e9, 1),
    }


def show(results: dict[str, Any]) -> None:
    """Print the tables."""
    print(f"{results['command']}\n{results['machine']}; {results['tokens']} tokens, pages of {results['page_size']}\n")
    figures = [f"{direction}_{figure}" for direction in DIRECTIONS for figure in ("ms", "gb_per_s", "time_ratio")]
    rows = [
        [str(row.get(name, "")) for name in ("way", "bytes_per_token", "bytes_ratio", *figures)]
        for row in results["transfers"]
    ]
    headers = ("", "bytes/token", "ratio", "backup ms", "GB/s", "time", "load ms", "GB/s", "time")
    print("\n".join(Table(headers, rows).lines()))
    print("\nstorage: " + ", ".join(f"{name} {value}" for name, value in results["storage"].items()))


if __name__ == "__main__":
    main()
