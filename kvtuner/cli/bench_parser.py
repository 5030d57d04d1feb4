"""Flags of ``kvtuner bench``. Knows nothing of what they do."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Final

from kvtuner.cli import flag_types
from kvtuner.cli.shared_flags import add_data_flags, add_model_flags, add_switch
from kvtuner.pipeline.bench_options import BenchOptions
from kvtuner.pipeline.evaluation_options import LEVELS
from kvtuner.pipeline.options import defaults_of

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULTS: Final = defaults_of(BenchOptions)
UNITS: Final = {None: 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    parser.add_argument("profile", metavar="PROFILE|RUN", help="profile.json or run folder")
    add_model_flags(parser)
    add_data_flags(parser)
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--against",
        type=flag_types.words(),
        metavar="SCHEME[,...]",
        help="beside bf16: fp8, or pairs such as K8V8; fp8 by default",
    )
    add_switch(group, "--ablation", "bf16, K8V8, K4V4, K2V2, K8V4, per channel, symmetric, fp8: quality and speed")
    group.add_argument(
        "--levels",
        type=flag_types.words(LEVELS),
        metavar="LEVEL[,...]",
        help="of kvtuner eval, for the ablation's quality; likelihood,recall by default",
    )
    _add_servers(parser)
    _add_loads(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--out", metavar="FOLDER", help="report and raw figures; runs/<model>-bench-... by default")


def _add_servers(parser: argparse.ArgumentParser) -> None:
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
    servers.add_argument(
        "--start-timeout", type=flag_types.positive, metavar="SECONDS", help="for a start; 1800 by default"
    )
    servers.add_argument(
        "--endpoint",
        type=flag_types.endpoint,
        action="append",
        metavar="[SCHEME=]URL",
        help="of servers that are there already, in place of starting any",
    )
    servers.add_argument("--api", choices=("sglang", "openai"), help="how endpoints are spoken to; sglang by default")


def _add_loads(parser: argparse.ArgumentParser) -> None:
    loads = parser.add_argument_group("load")

    def add(flag: str, kind: Callable[[str], object], metavar: str | None, text: str) -> None:
        # Lists are absent where they are not given: the text states the usual ones in fewer words than argparse would.
        default = argparse.SUPPRESS if kind is flag_types.counts else DEFAULTS[flag.removeprefix("--")]
        loads.add_argument(flag, type=kind, metavar=metavar, default=default, help=text)

    counts, positive = flag_types.counts, flag_types.positive
    add("--lengths", counts, "TOKENS[,...]", "of prompts; those of 10 to 32,000 that fit, by default")
    add("--outputs", counts, "TOKENS[,...]", "generated; 16, 64 and 256 by default")
    add("--concurrency", counts, "N[,...]", "requests in flight; doubled to what fits, by default")
    add("--batches", counts, "N[,...]", "sent at one moment; 1 to 16 by default")
    add("--rounds", positive, None, "of the same load, for stability")
    add("--repeats", positive, None, "requests, or batches, at each point")
    add("--prompt", positive, "TOKENS", "of loads not about lengths")
    add("--output", positive, "TOKENS", "of loads not about outputs")
    add("--timeout", positive, "SECONDS", "for one request")
    loads.add_argument(
        "--memory-bandwidth",
        type=_gigabytes,
        metavar="GB/S",
        help="of one GPU, for the gate on tokens per second; measured where servers are started here",
    )
    add("--seed", flag_types.seed, None, "of where prompts are cut from the text; the search's by default")


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB)?", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"bytes are written 512MiB or 40GiB, not {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def _gigabytes(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value * 1e9
