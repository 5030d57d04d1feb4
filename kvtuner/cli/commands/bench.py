"""``kvtuner bench``: is it worth it? Servers under load, one scheme to store the cache beside the others."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Final

from kvtuner.pipeline.bench_options import BenchOptions
from kvtuner.pipeline.benchmark import benchmark
from kvtuner.pipeline.options import options_from
from kvtuner.pipeline.progress import say
from kvtuner.report.bench_result import summary_lines

if TYPE_CHECKING:
    from argparse import Namespace

FAILED: Final = 1


def run(args: Namespace) -> int:
    """Run the sub-command: 1 where a gate fails, or where a scheme could not be served."""
    for ending in (signal.SIGTERM, signal.SIGHUP):  # servers end with this process
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    result, page = benchmark(options_from(BenchOptions, vars(args)))
    if args.json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        print("\n".join(summary_lines(result)))
    say(f"\nreport: {page}; the same in Markdown and JSON beside it, and every request in requests.jsonl")
    return FAILED if result.problems() else 0
