"""What a quantized host tier costs and saves, beside SGLang's unquantized host pool in the same run.

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
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kvtuner.precision import PrecisionPair
from kvtuner.quant import QuantSpec, Transform
from kvtuner.runtime_loader.host_tier.pages import HostPages, PageLayout
from kvtuner.runtime_loader.host_tier.stored_page import HEADER_BYTES, fault_of, identity_digest, seal
from kvtuner.runtime_loader.host_tier.transfer import DeviceSide, TorchMover, token_bytes
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.transforms import TransformKind, candidate_transforms

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT: Final = Path(__file__).resolve().parents[1]
LAYERS, HEADS, DIM = 28, 4, 128
"""Of Qwen2.5-7B."""
PAIRS: Final = ("K8V8", "K8V4", "K4V4", "K4V2")
KINDS: Final = {"plain": "none", "all transforms": "centered+balanced+hadamard"}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "machine": machine(device),
        "tokens": args.tokens,
        "page_size": args.page_size,
        "transfers": transfers(device, args.tokens, args.page_size, args.repeats),
        "storage": storage(args.page_size, args.repeats),
    }
    show(found)
    if args.serve:
        found["time_to_first_token"] = first_tokens(args.repeats)
        show_first_tokens(found["time_to_first_token"])
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def machine(device: torch.device) -> str:
    """For the reader of the figures."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} processors, {torch.get_num_threads()} threads, torch {torch.__version__}"


def transfers(device: torch.device, tokens: int, page_size: int, repeats: int) -> list[dict[str, Any]]:
    """Down and up by every way, SGLang's first."""
    pages = tokens // page_size
    slots = torch.arange(pages * page_size).view(pages, page_size)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    device_slots, host_slots = slots[order].flatten(), slots[order.flip(0)].flatten()
    stock_name = "SGLang, bf16" if device.type == "cuda" else "SGLang, bf16, its copy in torch"
    ways = {stock_name: stock(device, tokens, page_size)}
    for name, kind in KINDS.items():
        for pair in PAIRS:
            for packed in (True, False):
                if packed and name != "plain":
                    continue  # the same bytes, whatever they mean
                where = "packed device pool" if packed else f"quantized below, {name}"
                ways[f"{pair}, {where}"] = ours(
                    device, tokens, page_size, PrecisionPair.parse(pair), kind, packed=packed
                )
    rows: list[dict[str, Any]] = []
    for name, (token_size, down, up) in ways.items():
        times = {
            way: timed(lambda move=move: move(host_slots, device_slots), device, repeats)
            for way, move in (("backup", down), ("load", up))
        }
        first = rows[0] if rows else None
        row: dict[str, Any] = {"way": name, "bytes_per_token": token_size}
        for way, seconds in times.items():
            row[f"{way}_ms"] = round(1000 * seconds, 2)
            row[f"{way}_gb_per_s"] = round(token_size * tokens / seconds / 1e9, 2)
            row[f"{way}_time_ratio"] = round(row[f"{way}_ms"] / first[f"{way}_ms"], 2) if first else 1.0
        row["bytes_ratio"] = round(token_size / rows[0]["bytes_per_token"], 3) if rows else 1.0
        rows.append(row)
    if device.type == "cuda":
        rows.append(copy_bandwidth(repeats))
    return rows


def stock(device: torch.device, tokens: int, page_size: int) -> tuple[int, Any, Any]:
    """SGLang's own host pool over its own device pool."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host import mha

    pool = MHATokenToKVPool(
        tokens, page_size=page_size, dtype=torch.bfloat16, head_num=HEADS, head_dim=DIM, layer_num=LAYERS,
        device=device.type, enable_memory_saver=False,
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

    def down(host_slots: torch.Tensor, device_slots: torch.Tensor) -> None:
        at_host = host_slots if staged or not on_gpu else host_slots.to(device)
        host.backup_from_device_all_layer(pool, at_host, device_slots.to(device), backend)

    def up(host_slots: torch.Tensor, device_slots: torch.Tensor) -> None:
        at_host, at_device = host_slots.to(device), device_slots.to(device)
        for layer in range(LAYERS):
            host.load_to_device_per_layer(pool, at_host, at_device, layer, backend)

    return host.size_per_token, down, up


def copy_in_torch(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """What SGLang's CUDA operator does, page by page, for a processor."""
    sources, targets = src_indices[::page_size] // page_size, dst_indices[::page_size] // page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        pages = [each.view(len(each) // page_size, -1).view(torch.int64) for each in (source, target)]
        pages[1][targets] = pages[0][sources]


def ours(
    device: torch.device, tokens: int, page_size: int, pair: PrecisionPair, kind: str, *, packed: bool
) -> tuple[int, Any, Any]:
    """Our host tier."""
    assert kind in candidate_transforms("k")
    generator = torch.Generator().manual_seed(0)
    slots = tokens + page_size

    def side(bits: int, kind: str) -> DeviceSide:
        parts = TransformKind.parse(kind)
        ones = torch.ones(HEADS, DIM, dtype=torch.float16)
        transform = Transform(parts, ones if parts.centered else None, ones if parts.balanced else None)
        row_format = RowFormat(HEADS, DIM, QuantSpec(bits, transform))
        if packed:
            size = (slots, row_format.row_bytes(torch.bfloat16))
            rows = torch.randint(256, size, dtype=torch.uint8, generator=generator).to(device)
            return DeviceSide(rows, row_format, packed)
        states = torch.randn(slots, HEADS, DIM, generator=generator).bfloat16().to(device)
        return DeviceSide(states, row_format, packed)

    v_kind = "hadamard" if "hadamard" in kind else "none"
    layers = [(side(pair.k_bits, kind), side(pair.v_bits, v_kind)) for _ in range(LAYERS)]
    layout = PageLayout(page_size, token_bytes(layers), tokens // page_size + 1, "page_first")
    buffer = torch.zeros(layout.buffer_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pages = HostPages(layout, buffer)
    mover: Any = TorchMover(layers, pages)
    if device.type == "cuda":
        from kvtuner.runtime_loader.kernels.page_mover import TritonMover

        mover = TritonMover(layers, pages)

    def up(host_slots: torch.Tensor, device_slots: torch.Tensor) -> None:
        at_host, at_device = mover.place(host_slots), mover.place(device_slots)
        for layer in range(LAYERS):
            mover.load(layer, at_host, at_device)

    check(mover, pages, layers)
    return layout.token_bytes, lambda host, own: mover.backup(mover.place(host), mover.place(own)), up


def check(mover: Any, pages: HostPages, layers: list[tuple[DeviceSide, DeviceSide]]) -> None:
    """Move one page down and up, and compare both with `quant.py`; a tier that is wrong is not timed."""
    page_size = pages.layout.page_size
    slots = mover.place(torch.arange(page_size))
    mover.backup(slots, slots)
    for layer, sides in enumerate(layers):
        for name, side in enumerate(sides):
            before = side.buffer[:page_size].cpu()
            rows = before.view(page_size, -1) if side.packed else side.format.pack(before)
            after = before if side.packed else side.format.unpack(rows, before.dtype)
            if side.buffer.is_cuda:
                torch.cuda.synchronize()
            right = torch.equal(pages.rows(layer, name)[0], rows)
            mover.load(layer, slots, slots)
            if not right or not torch.equal(side.buffer[:page_size].cpu(), after):
                raise SystemExit(f"layer {layer} is not what quant.py makes of it: nothing is timed")


def timed(move: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median seconds, after two runs that are not counted."""
    seconds = []
    for run in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        move()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if run > 1:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def copy_bandwidth(repeats: int) -> dict[str, Any]:
    """One large copy each way: what the bus gives."""
    size = 1 << 28
    host, there = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device="cuda"),
    )
    row: dict[str, Any] = {"way": "one copy of 256 MiB"}
    for way, move in (("backup", lambda: host.copy_(there)), ("load", lambda: there.copy_(host))):
        seconds = timed(lambda move=move: move(), torch.device("cuda"), repeats)
        row |= {f"{way}_ms": round(1000 * seconds, 2), f"{way}_gb_per_s": round(size / seconds / 1e9, 2)}
    return row


def storage(page_size: int, repeats: int) -> dict[str, float]:
    """Sealing and checking a page of K4V4: GB/s of one core."""
    page_bytes = page_size * LAYERS * 2 * HEADS * (DIM // 2 + 4)
    stored = torch.randint(256, (HEADER_BYTES + page_bytes,), dtype=torch.uint8)
    identity, key, device = identity_digest({}), "0" * 64, torch.device("cpu")
    sealing = timed(lambda: seal(stored, identity, key), device, 20 * repeats)
    checking = timed(lambda: fault_of(stored, identity, key), device, 20 * repeats)
    return {
        "page_bytes": page_bytes,
        "header_share": round(HEADER_BYTES / page_bytes, 5),
        "seal_gb_per_s": round(page_bytes / sealing / 1e9, 1),
        "check_gb_per_s": round(page_bytes / checking / 1e9, 1),
    }


PREFIXES: Final = (512, 2048, 6144)
PORT: Final = 31811


def first_tokens(repeats: int) -> list[dict[str, Any]]:
    """Of the demo model: milliseconds until an answer's first token, by where its prefix lies."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        write_profile(profile)
        for name, flags in (
            ("packed device pool", ("--kvtuner-profile", str(profile))),
            ("quantized below", ("--kvtuner-profile", str(profile), "--kvtuner-hicache-only")),
        ):
            rows += served(name, flags, Path(folder) / name.replace(" ", "-"), repeats)
    return rows


def write_profile(path: Path) -> None:
    """K4V4 in every layer, for the demo model."""
    from transformers import AutoConfig

    from kvtuner.exported_configs.identity.model_identity import identity_of
    from kvtuner.exported_configs.profile.build import dump_profile, uniform_profile
    from kvtuner.geometry import ModelGeometry

    config = AutoConfig.from_pretrained(ROOT / "calibration" / "demo" / "model")
    identity = identity_of(config, id="demo", revision=None, dtype="float32")
    pair, geometry = PrecisionPair(4, 4), ModelGeometry.from_config(config)
    path.write_bytes(
        dump_profile(uniform_profile(geometry, pair, identity, k_group_size=None, v_group_size=None, symmetric=False))
    )


def served(name: str, flags: tuple[str, ...], folder: Path, repeats: int) -> list[dict[str, Any]]:
    """One way of serving: the server is started twice, so that the second finds the first one's pages in storage."""
    rng = random.Random(0)
    prompts = {size: [[rng.randrange(2, 300) for _ in range(size + 16)] for _ in range(repeats)] for size in PREFIXES}
    churn = [[rng.randrange(2, 300) for _ in range(7000)] for _ in range(2)]
    times: dict[tuple[int, str], list[float]] = {}
    config = json.dumps({"file_storage_path": str(folder), "prefetch_threshold": 64})
    below = ("--hicache-storage-backend", "file", "--hicache-storage-backend-config", config)
    wait = ("--hicache-storage-prefetch-policy", "wait_complete")
    for start in range(2):
        with Server(*flags, *below, *wait) as server:
            server.ask(churn[0][:64])
            for size in PREFIXES:
                for prompt in prompts[size]:
                    expected = ("storage",) if start else ("computed", "device", "host")
                    for place in expected:
                        if place == "host":
                            for other in churn:
                                server.ask(other)
                        seconds, found = server.ask(prompt)
                        assert found == place, (found, place, size)
                        times.setdefault((size, place), []).append(seconds)
    return [
        {"way": name, "prefix": size, "from": place, "ms": round(1000 * statistics.median(seconds), 1)}
        for (size, place), seconds in times.items()
    ]


class Server:
    """A server of the demo model on a processor, with a host tier."""

    def __init__(self, *flags: str) -> None:
        path = os.pathsep.join([str(ROOT / "examples" / "sglang_on_cpu"), str(ROOT)])
        model = str(ROOT / "calibration" / "demo" / "model")
        device = ("--device", "cpu", "--dtype", "float32", "--disable-cuda-graph")
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--port", str(PORT), *device,
            "--max-total-tokens", "8192", "--max-running-requests", "2", "--mem-fraction-static", "0.5",
            "--page-size", "64", "--chunked-prefill-size", "-1", "--enable-hierarchical-cache", "--hicache-ratio", "16",
            "--enable-cache-report", *flags,
        ]  # fmt: skip
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env={**os.environ, "PYTHONPATH": path}, start_new_session=True
        )

    def __enter__(self) -> Server:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health_generate", timeout=60)
            except (urllib.error.URLError, OSError):
                time.sleep(1)
            else:
                return self
        self._log.seek(0)
        raise SystemExit(self._log.read().decode()[-3000:])

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, 9)
        self._process.wait()

    def ask(self, ids: list[int]) -> tuple[float, str]:
        """Seconds for one token, and where most of the prompt was found."""
        body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            meta = json.load(answer)["meta_info"]
        seconds = time.perf_counter() - begin
        details = meta.get("cached_tokens_details") or {}
        places = {place: details.get(place, 0) for place in ("device", "host", "storage")}
        place = max(places, key=lambda each: places[each])
        return seconds, place if places[place] > len(ids) // 2 else "computed"


def show(found: dict[str, Any]) -> None:
    """A table."""
    print(f"{found['command']}\n{found['machine']}; {found['tokens']} tokens, pages of {found['page_size']}\n")
    columns = ("backup ms", 10), ("GB/s", 7), ("time", 6), ("load ms", 9), ("GB/s", 7), ("time", 6)
    head = " ".join(f"{name:>{width}}" for name, width in (("bytes/token", 11), ("ratio", 6), *columns))
    print(f"{'':42} {head}")
    for row in found["transfers"]:
        cells = [f"{row.get('bytes_per_token', ''):>11}", f"{row.get('bytes_ratio', ''):>6}"]
        for way, width in (("backup", 10), ("load", 9)):
            cells.append(
                f"{row[f'{way}_ms']:>{width}} {row[f'{way}_gb_per_s']:>7} {row.get(f'{way}_time_ratio', ''):>6}"
            )
        print(f"{row['way']:42} {' '.join(cells)}")
    print("\nstorage: " + ", ".join(f"{name} {value}" for name, value in found["storage"].items()))


def show_first_tokens(rows: list[dict[str, Any]]) -> None:
    """A table."""
    places = ("computed", "device", "host", "storage")
    print(f"\nmilliseconds to the first token{'':12}" + "".join(f"{place:>10}" for place in places))
    for way in dict.fromkeys(row["way"] for row in rows):
        for size in PREFIXES:
            cells = {row["from"]: row["ms"] for row in rows if row["way"] == way and row["prefix"] == size}
            print(f"{way}, prefix {size:<16}".ljust(43) + "".join(f"{cells[place]:>10}" for place in places))


if __name__ == "__main__":
    main()
