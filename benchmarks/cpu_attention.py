"""Times attention over packed rows on a processor beside torch's over bf16, interleaved in one run.

    OMP_NUM_THREADS=2 python benchmarks/cpu_attention.py --threads 1 2 --tokens 4096 16384 65536 --bits 4 2 8

A step is one decoding token of every request, 8 KV heads, GQA 4, 128 channels. Every call reads another copy of the
cache, so that what a last call left in a cache of the processor does not help. Times are medians of processor time,
which what else runs on the machine changes less than it does wall time. Read bandwidth is that of a sum by torch.

Goals at 16k tokens and more, with AVX-512 VNNI: K4V4 4 times faster than SDPA in bf16, and twice as fast as the best of
torch's in bf16, K2V2 2.5 times; with AVX2 K4V4 1.7 times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvtuner.quant import QuantSpec
from kvtuner.runtime_loader.cpu.instruction_sets import runnable_sets
from kvtuner.runtime_loader.cpu.native_attention import NativeAttention
from kvtuner.runtime_loader.packed_attention import PackedRows, ScoreScaling
from kvtuner.runtime_loader.row_format import RowFormat
from kvtuner.runtime_loader.torch_attention import TorchAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from kvtuner.runtime_loader.packed_attention import PackedAttention

PAGE: Final = """# Attention on a processor

[docs/processor.md](../../docs/processor.md) says what this shows. Two virtual cores of an EPYC of the fourth generation
(Zen 4), which others used meanwhile. 8 KV heads, GQA 4, 128 channels, one scale for a head, medians.

    {command}

{tables}"""
NUM_KV_HEADS: Final = 8
GQA: Final = 4
HEAD_DIM: Final = 128
SCORES: Final = ScoreScaling(HEAD_DIM**-0.5)
COLD_BYTES: Final = 256 << 20
"""The bytes of all copies of a cache together, several times the last level of a processor's cache."""


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one table."""

    threads: int
    batch: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Medians:
    """An implementation's medians: milliseconds, and gigabytes of cache that it reads in a second of wall time."""

    case: Requests
    name: str
    processor_ms: float
    wall_ms: float
    gb_per_second: float


@dataclass(frozen=True, slots=True)
class Stepper:
    """A way to attend: what it reads in bytes, and its step, of which every call reads another copy."""

    num_bytes: int
    step: Callable[[], object]


def packed(case: Requests, bits: int, attention: PackedAttention) -> Stepper:
    """Attention over packed rows of `bits`, one scale for a head, as the server calls it."""
    num_tokens, row_format = case.batch * case.tokens, RowFormat(NUM_KV_HEADS, HEAD_DIM, QuantSpec(bits))
    states = torch.randn(2048, NUM_KV_HEADS, HEAD_DIM)
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


def num_copies(num_bytes: int) -> int:
    """The copies of a cache that do not fit in a processor's cache."""
    return max(2, -(-COLD_BYTES // num_bytes))


def implementations(case: Requests, widths: list[int]) -> Iterator[tuple[str, Stepper]]:
    """Every implementation by its name."""
    for bits, kind in itertools.product(widths, [kind for kind in runnable_sets() if kind.has_integer_products]):
        yield f"{kind.name} K{bits}V{bits}", packed(case, bits, NativeAttention(kind.name))
    first = f"K{widths[0]}V{widths[0]}"
    for kind in runnable_sets():
        attention = NativeAttention(kind.name, integer_products=False)
        yield f"{kind.name}, float32, {first}", packed(case, widths[0], attention)
    yield f"torch blockwise {first}", packed(case, widths[0], TorchAttention())
    if case.tokens <= 4096:  # it takes a second at 64k
        yield f"torch dequantized {first}", dequantized(case, widths[0])
    for name, attend in BF16.items():
        yield name, unpacked(case, attend)


def read_all(buffer: Tensor) -> Stepper:
    """A sum over memory that no cache holds."""
    return Stepper(buffer.nbytes, buffer.sum)


def measured(case: Requests, widths: list[int], rounds: int) -> list[Medians]:
    """Time all implementations in turn, `rounds` times."""
    torch.set_num_threads(case.threads)
    runs = dict(implementations(case, widths))
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
    lines = [
        f"### {case.batch} x {case.tokens} tokens, {case.threads} thread{'s' * (case.threads > 1)}\n",
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


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--bits", type=int, nargs="+", default=[4], choices=[2, 3, 4, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="the file of all medians")
    parser.add_argument("--markdown", type=Path, help="the page of all tables")
    args = parser.parse_args()
    torch.manual_seed(0)
    everything: list[Medians] = []
    tables: list[str] = []
    for threads, batch, tokens in itertools.product(args.threads, args.batch, args.tokens):
        timed = measured(Requests(threads, batch, tokens), args.bits, args.rounds)
        everything += timed
        tables.append(table(timed))
        print(tables[-1], flush=True)
    if args.markdown:
        command = f"OMP_NUM_THREADS={max(args.threads)} python {' '.join(sys.argv)}"
        args.markdown.write_text(PAGE.format(command=command, tables="\n".join(tables)))
    if args.json:
        machine = {"machine": platform.machine(), "torch": torch.__version__, "rounds": args.rounds}
        args.json.write_text(json.dumps({**machine, "medians": [asdict(row) for row in everything]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
