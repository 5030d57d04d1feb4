"""Flags of ``kvtuner bench``. Knows nothing of what they do."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvtuner.pipeline.bench_options import BenchOptions
from kvtuner.pipeline.options import defaults_of

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULTS: Final = defaults_of(BenchOptions)
UNITS: Final = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class Types:
    """The functions that read flags' values, shared with other sub-commands."""

    counts: Callable[[str], tuple[int, ...]]
    positive: Callable[[str], int]
    words: Callable[[str], tuple[str, ...]]
    levels: Callable[[str], tuple[str, ...]]
    endpoint: Callable[[str], tuple[str, str]]


def add_bench_flags(
    parser: argparse.ArgumentParser, types: Types, *, seed: Callable[[str], int], switch: Callable[..., None]
) -> None:
    """Add the flags to a parser.

    Args:
        parser: The parser of the sub-command.
        types: The functions that read values.
        seed: The function that reads a seed.
        switch: The function that adds a flag that can be turned off.
    """
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--against",
        type=types.words,
        metavar="SCHEME[,...]",
        help="beside bf16: fp8, or pairs such as K8V8; fp8 by default",
    )
    switch(group, "--ablation", "bf16, K8V8, K4V4, K2V2, K8V4, per channel, symmetric, fp8: quality and speed")
    group.add_argument(
        "--levels",
        type=types.levels,
        metavar="LEVEL[,...]",
        help="of kvtuner eval, for the ablation's quality; likelihood,recall by default",
    )
    servers = parser.add_argument_group("servers, started here one after another")
    servers.add_argument(
        "--server-args", default="", metavar="'FLAGS'", help="of sglang.launch_server, the same for every scheme"
    )
    servers.add_argument(
        "--kv-memory",
        type=_bytes,
        metavar="BYTES",
        help="for the KV pool of every scheme, such as 40GiB; SGLang decides",
    )
    servers.add_argument("--start-timeout", type=types.positive, metavar="SECONDS", help="for a start; 1800 by default")
    servers.add_argument(
        "--endpoint",
        type=types.endpoint,
        action="append",
        metavar="[SCHEME=]URL",
        help="of servers that are there already, in place of starting any",
    )
    servers.add_argument("--api", choices=("sglang", "openai"), help="how endpoints are spoken to; sglang by default")
    loads = parser.add_argument_group("load")
    loads.add_argument(
        "--lengths",
        type=types.counts,
        metavar="TOKENS[,...]",
        help="of prompts; those of 10 to 32,000 that fit, by default",
    )
    loads.add_argument(
        "--outputs", type=types.counts, metavar="TOKENS[,...]", help="generated; 16, 64 and 256 by default"
    )
    loads.add_argument(
        "--concurrency",
        type=types.counts,
        metavar="N[,...]",
        help="requests in flight; doubled to what fits, by default",
    )
    loads.add_argument("--batches", type=types.counts, metavar="N[,...]", help="sent at one moment; 1 to 16 by default")
    loads.add_argument(
        "--rounds", type=types.positive, default=DEFAULTS["rounds"], help="of the same load, for stability"
    )
    loads.add_argument(
        "--repeats", type=types.positive, default=DEFAULTS["repeats"], help="requests, or batches, at each point"
    )
    loads.add_argument(
        "--prompt", type=types.positive, default=DEFAULTS["prompt"], metavar="TOKENS", help="of loads not about lengths"
    )
    loads.add_argument(
        "--output", type=types.positive, default=DEFAULTS["output"], metavar="TOKENS", help="of loads not about outputs"
    )
    loads.add_argument(
        "--timeout", type=types.positive, default=DEFAULTS["timeout"], metavar="SECONDS", help="for one request"
    )
    loads.add_argument(
        "--memory-bandwidth",
        type=_gigabytes,
        metavar="GB/S",
        help="of one GPU, for the gate on tokens per second; measured where servers are started here",
    )
    loads.add_argument("--seed", type=seed, help="of where prompts are cut from the text; the search's by default")
    run = parser.add_argument_group("run")
    run.add_argument("--out", metavar="FOLDER", help="report and raw figures; runs/<model>-bench-... by default")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB)?", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"bytes are written 512MiB or 40GiB, not {text!r}")
    return int(float(match[1]) * UNITS[match[2] or ""])


def _gigabytes(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value * 1e9
