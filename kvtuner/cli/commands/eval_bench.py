"""``kvtuner eval`` and ``kvtuner bench``: is the answer still right, and is it worth it."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final

from kvtuner.cli.command import Command, add_options, add_profile
from kvtuner.pipeline.eval_bench_options import BenchOptions, EvalOptions
from kvtuner.pipeline.flags.option_fields import options_from
from kvtuner.pipeline.progress import say, say_loading

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def _add_flags(parser: ArgumentParser, options: type) -> None:
    add_profile(parser, "profile")
    add_options(parser, options)


def _evaluate(args: Namespace) -> int:
    options = options_from(EvalOptions, vars(args))
    say_loading()
    from kvtuner.exported_configs.evaluation_verdict import evaluation_verdict
    from kvtuner.pipeline.evaluate import run_evaluation
    from kvtuner.report.evaluation_report import evaluation_lines
    from kvtuner.report.layer_strip import Terminal

    result = run_evaluation(options)
    if args.json:
        files = {"evaluation": str(result.file), "page": str(result.page)}
        verdict = asdict(evaluation_verdict(result.evaluation))
        print(json.dumps({**files, "verdict": verdict, **result.evaluation.to_json()}, indent=1))
        return 0
    print("\n".join(evaluation_lines(result.evaluation, result.profile, Terminal.of_stdout().width)))
    again = shlex.join(["kvtuner", "show", str(result.profile_file)])
    say(f"\nwritten to {result.file}; to see it again: {again}\npage: {result.page}")
    if result.samples is not None:
        say(f"what every scheme says after the same beginnings, side by side: {result.samples}")
    return 0


def _benchmark(args: Namespace) -> int:
    """The status is 1 where a gate fails, or where a scheme could not be served."""
    options = options_from(BenchOptions, vars(args))
    say_loading()
    from kvtuner.pipeline.benchmark import benchmark
    from kvtuner.report.bench_report import summary_lines
    from kvtuner.report.layer_strip import Terminal

    for ending in (signal.SIGTERM, signal.SIGHUP):  # servers end with this process
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    result, page = benchmark(options)
    text = "\n".join(summary_lines(result, Terminal.of_stdout().width))
    print(json.dumps(result.to_json(), indent=1) if args.json else text)
    say(f"\nreport: {page}; the same in Markdown and JSON beside it, and every request in requests.jsonl")
    return int(bool(result.problems()))


COMMANDS: Final = (
    Command(
        "eval",
        "is the answer still right, beside the unquantized model, fp8 and int8",
        partial(_add_flags, options=EvalOptions),
        _evaluate,
        resumes=True,
    ),
    Command(
        "bench",
        "is it worth it: servers under load, beside bf16 and fp8, and the ablation",
        partial(_add_flags, options=BenchOptions),
        _benchmark,
        resumes=True,
    ),
)
