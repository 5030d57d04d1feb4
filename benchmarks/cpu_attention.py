"""Times attention over packed rows on a processor beside torch's over bf16, and others', interleaved in one run.

    OMP_NUM_THREADS=2 python benchmarks/cpu_attention.py --threads 1 2 --tokens 4096 16384 65536 --bits 4 2 8

`--ggml FOLDER` adds ggml's flash attention (cpu_parts/ggml_attention.py says where its sources are), `--onnx` ONNX
Runtime's (cpu_parts/onnx_attention.py). Either is compared with float32 over what its own cache holds before it is
timed.

A step is one decoding token of every request, 8 KV heads, GQA 4, 128 channels. Every call reads another copy of the
cache, so that what a last call left in a cache of the processor does not help. Times are medians of processor time,
which what else runs on the machine changes less than it does wall time. Read bandwidth is that of a sum by torch.
`--waiting passive` adds a process in which OpenMP's idle threads sleep (OMP_WAIT_POLICY=passive) to tables of several
threads; it takes its turns after the other, not between.

Goals at 16k tokens and more, with AVX-512 VNNI: K4V4 4 times faster than SDPA in bf16, and twice as fast as the best of
torch's in bf16, K2V2 2.5 times; with AVX2 K4V4 1.7 times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from cpu_parts.ggml_attention import build_ggml, ggml_steppers
from cpu_parts.growth_plot import growth_picture
from cpu_parts.onnx_attention import missing_packages, onnx_steppers
from cpu_parts.step import COLD_BYTES, GQA, HEAD_DIM, NUM_KV_HEADS, Requests, Stepper, num_copies, random_states
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.cpu.instruction_sets import runnable_sets
from kvtuner.runtime_loader.cpu.native_attention import NativeAttention
from kvtuner.runtime_loader.packed_attention import PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import PackedAttention

PAGE: Final = """# Attention on a processor

[docs/processor.md](../../docs/processor.md) says what this shows. Two virtual cores of an EPYC of the fourth generation
(Zen 4). 8 KV heads, GQA 4, 128 channels, one scale for a head, medians.

    {command}

{tables}"""
SCORES: Final = ScoreScaling(HEAD_DIM**-0.5)
LAST_DEQUANTIZED: Final = 4096
"""The most tokens that are read back to float32 numbers, which takes a second at 64k."""
WAITING: Final = "OMP_WAIT_POLICY"


@dataclass(frozen=True, slots=True)
class Medians:
    """An implementation's medians: milliseconds, and gigabytes of cache that it reads in a second of wall time."""

    case: Requests
    name: str
    processor_ms: float
    wall_ms: float
    gb_per_second: float


def packed(case: Requests, bits: int, attention: PackedAttention) -> Stepper:
    """Attention over packed rows of `bits`, one scale for a head, as the server calls it."""
    num_tokens, row_format = case.batch * case.tokens, RowFormat(NUM_KV_HEADS, HEAD_DIM, QuantSpec(bits))
    states = random_states(replace(case, batch=1, tokens=2048))[0]
    rows = row_format.pack(states).repeat(num_tokens // len(states) + 1, 1)[:num_tokens].contiguous()
    num_bytes = 2 * rows.nbytes
    copies = itertools.cycle(
        [
            (PackedRows(rows.clone(), row_format), PackedRows(rows.clone(), row_format))
            for _ in range(num_copies(num_bytes))
        ]
    )
    q = torch.randn(case.batch, NUM_KV_HEADS * GQA, HEAD_DIM, dtype=torch.bfloat16)
    indptr, slots = torch.arange(case.batch + 1) * case.tokens, torch.arange(num_tokens)
    return Stepper(num_bytes, lambda: attention.decode(q, *next(copies), indptr, slots, SCORES))


def dequantized(case: Requests, bits: int) -> Stepper:
    """Rows that are read back to float32 numbers, and torch's attention over these."""
    row_format = RowFormat(NUM_KV_HEADS, HEAD_DIM, QuantSpec(bits))
    states = torch.randn(2048, NUM_KV_HEADS, HEAD_DIM)
    rows = row_format.pack(states).repeat(case.tokens // len(states) + 1, 1)[: case.tokens]
    q = torch.randn(1, NUM_KV_HEADS * GQA, 1, HEAD_DIM)

    def step() -> Tensor:
        for _ in range(case.batch):
            k, v = (row_format.unpack(rows, torch.float32).transpose(0, 1).unsqueeze(0) for _ in range(2))
            output = sdpa(q, k, v, enable_gqa=True)
        return output

    return Stepper(2 * case.batch * rows.nbytes, step)


def unpacked(case: Requests, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Stepper:
    """Attention over keys and values [batch, num_kv_heads, tokens, head_dim] in bf16."""
    shape = (case.batch, NUM_KV_HEADS, case.tokens, HEAD_DIM)
    k = torch.randn(shape, dtype=torch.bfloat16)
    copies = itertools.cycle([(k.clone(), k.clone()) for _ in range(num_copies(2 * k.nbytes))])
    q = torch.randn(case.batch, NUM_KV_HEADS, GQA, HEAD_DIM, dtype=torch.bfloat16)
    return Stepper(2 * k.nbytes, lambda: attend(q, *next(copies)))


def by_query_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA as models call it."""
    return sdpa(q.flatten(1, 2).unsqueeze(2), k, v, enable_gqa=True)


def by_kv_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA with the queries of a KV head as its tokens, which reads every key once."""
    return sdpa(q, k, v)


def by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two products of matrices, likewise."""
    weights = torch.softmax((q @ k.transpose(-1, -2)).float() * SCORES.scale, -1)
    return weights.bfloat16() @ v


BF16: Final = {"SDPA bf16 (gqa)": by_query_head, "SDPA bf16 (grouped)": by_kv_head, "matmul bf16": by_products}


@dataclass(frozen=True, slots=True)
class Contents:
    """What a run times: the widths of rows, and the other implementations."""

    widths: tuple[int, ...]
    ggml: ctypes.CDLL | None
    has_onnx: bool


def implementations(case: Requests, contents: Contents) -> Iterator[tuple[str, Stepper]]:
    """Every implementation by its name."""
    widths = contents.widths
    for bits, kind in itertools.product(widths, [kind for kind in runnable_sets() if kind.has_integer_products]):
        yield f"{kind.name} K{bits}V{bits}", packed(case, bits, NativeAttention(kind.name))
    first = f"K{widths[0]}V{widths[0]}"
    for kind in runnable_sets():
        attention = NativeAttention(kind.name, integer_products=False)
        yield f"{kind.name}, float32, {first}", packed(case, widths[0], attention)
    yield f"torch blockwise {first}", packed(case, widths[0], TorchAttention())
    if case.tokens <= LAST_DEQUANTIZED:
        yield f"torch dequantized {first}", dequantized(case, widths[0])
    for name, attend in BF16.items():
        yield name, unpacked(case, attend)
    if contents.ggml is not None:
        yield from ggml_steppers(contents.ggml, case).items()
    if contents.has_onnx:
        found, refused = onnx_steppers(case)
        yield from found.items()
        for line in refused:
            print(line, file=sys.stderr)


def read_all(buffer: Tensor) -> Stepper:
    """A sum over memory that no cache holds."""
    return Stepper(buffer.nbytes, buffer.sum)


def measured(case: Requests, contents: Contents, rounds: int) -> list[Medians]:
    """Time all implementations in turn, `rounds` times."""
    torch.set_num_threads(case.threads)
    runs = dict(implementations(case, contents))
    runs["read bandwidth"] = read_all(torch.zeros(COLD_BYTES // 4, dtype=torch.float32))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for run in runs.values():
        run.step()
    for _ in range(rounds):
        for name, run in runs.items():
            wall, processor = time.perf_counter(), time.process_time()
            run.step()
            times[name].append((time.process_time() - processor, time.perf_counter() - wall))
    timed = []
    for name, pairs in times.items():
        processor_ms, wall_ms = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
        timed.append(Medians(case, name, processor_ms, wall_ms, runs[name].num_bytes / wall_ms / 1e6))
    return timed


def table(timed: list[Medians]) -> str:
    """A table of one case, with how many times faster than SDPA and the best of bf16 each one is."""
    case, by_name = timed[0].case, {row.name: row.processor_ms for row in timed}
    gqa, best = by_name["SDPA bf16 (gqa)"], min(by_name[name] for name in BF16)
    waiting = f", {WAITING}={case.waiting}" if case.waiting != "default" else ""
    lines = [
        f"### {case.batch} x {case.tokens} tokens, {case.threads} thread{'s' * (case.threads > 1)}{waiting}\n",
        "| | processor ms | wall ms | GB/s | SDPA bf16 (gqa) / it | best bf16 / it |\n|---|---|---|---|---|---|",
    ]
    for row in timed:
        ratios = f"{gqa / row.processor_ms:.2f} | {best / row.processor_ms:.2f}"
        if row.name == "read bandwidth":
            ratios = "| "
        lines.append(
            f"| {row.name} | {row.processor_ms:.2f} | {row.wall_ms:.2f} | {row.gb_per_second:.1f} | {ratios} |"
        )
    return "\n".join(lines) + "\n"


def measured_apart(case: Requests, arguments: list[str]) -> list[Medians]:
    """Time a case in a process of its own, whose OpenMP reads how threads wait when it starts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "medians.json"
        shape = ["--threads", str(case.threads), "--batch", str(case.batch), "--tokens", str(case.tokens)]
        command = [sys.executable, __file__, *arguments, *shape, "--waiting", "default", "--json", str(path)]
        environment = {**os.environ, WAITING: case.waiting, "OMP_NUM_THREADS": str(case.threads)}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        rows = json.loads(path.read_text(encoding="utf-8"))["medians"]
    return [Medians(**{**row, "case": case}) for row in rows]


def growth(medians: list[Medians]) -> dict[str, list[tuple[int, float]]]:
    """The lines of the picture: requests of one thread and batch, as far as several lengths were measured."""
    first = medians[0].case
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(medians, key=lambda row: row.case.tokens):
        if replace(row.case, tokens=first.tokens) == first and row.name != "read bandwidth":
            lines.setdefault(row.name, []).append((row.case.tokens, row.processor_ms))
    return {name: line for name, line in lines.items() if len(line) > 1}


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="tokens of a request, 4096 to 131072")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="requests of a step")
    parser.add_argument("--bits", type=int, nargs="+", default=[4], choices=[2, 3, 4, 8])
    parser.add_argument("--most-tokens", type=int, default=1 << 17, help="the most of all requests; more is left out")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ggml", type=Path, help="the folder of ggml's sources")
    parser.add_argument("--onnx", action="store_true", help="add ONNX Runtime's attention")
    parser.add_argument("--waiting", nargs="+", choices=["default", "passive"], default=["default"])
    parser.add_argument("--json", type=Path, help="the file of all medians")
    parser.add_argument("--markdown", type=Path, help="the page of all tables")
    parser.add_argument("--picture", type=Path, help="the SVG file of the first batch and thread count's growth")
    return parser


def main() -> None:
    """Run the command line."""
    args = command_line().parse_args()
    if args.onnx and (missing := missing_packages()):
        sys.exit(f"--onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    contents = Contents(tuple(args.bits), build_ggml(args.ggml) if args.ggml else None, args.onnx)
    torch.manual_seed(0)
    everything: list[Medians] = []
    tables: list[str] = []
    shared = ["--rounds", str(args.rounds), "--bits", *map(str, args.bits), *(["--onnx"] if args.onnx else [])]
    shared += ["--ggml", str(args.ggml)] if args.ggml else []
    for threads, batch, tokens, waiting in itertools.product(args.threads, args.batch, args.tokens, args.waiting):
        case = Requests(threads, batch, tokens, waiting)
        if batch * tokens > args.most_tokens or (waiting == "passive" and threads == 1):
            continue
        apart = waiting == "passive"
        timed = measured_apart(case, shared) if apart else measured(case, contents, args.rounds)
        everything += timed
        tables.append(table(timed))
        print(tables[-1], flush=True)
    if args.markdown:
        command = f"OMP_NUM_THREADS={max(args.threads)} python {' '.join(sys.argv)}"
        args.markdown.write_text(PAGE.format(command=command, tables="\n".join(tables)))
    if args.json:
        machine = {"machine": platform.machine(), "torch": torch.__version__, "rounds": args.rounds}
        args.json.write_text(json.dumps({**machine, "medians": [asdict(row) for row in everything]}, indent=1) + "\n")
    if args.picture and (lines := growth(everything)):
        first = everything[0].case
        title = f"A decoding step by tokens: batch {first.batch}, {first.threads} thread{'s' * (first.threads > 1)}"
        args.picture.write_text(growth_picture(lines, title), encoding="utf-8")


if __name__ == "__main__":
    main()
