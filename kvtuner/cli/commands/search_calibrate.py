"""``kvtuner search`` and ``kvtuner calibrate``: from a model to profiles, or to the sensitivity table alone."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Final

from kvtuner.cli.command import Command, add_options, add_switch
from kvtuner.pipeline.flags.option_fields import options_from
from kvtuner.pipeline.options import CalibrateOptions, SearchOptions
from kvtuner.pipeline.progress import say, say_loading
from kvtuner.pipeline.stages.worker_processes import WorkerPlace, check_workers, waiting_workers

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from contextlib import AbstractContextManager

    from kvtuner.pipeline.search import SearchResult
    from kvtuner.pipeline.stages.worker_processes import WaitingWorkers


def _search(args: Namespace) -> int:
    options = options_from(SearchOptions, vars(args))
    if args.dry_run:
        return _dry_run(options, as_json=args.json)
    is_first = _begin()
    with _waiting_workers(options) as waiting:
        from kvtuner.pipeline.search import run_search

        on_result = None if args.json else partial(_print_result, verbose=args.verbose)
        results = run_search(options, on_result=on_result, waiting=waiting)
    if args.json and is_first:
        printed = [result.to_json() for result in results]
        print(json.dumps(printed[0] if len(printed) == 1 else printed, indent=1))
    return 0


def _begin() -> bool:
    """Say that the command begins, in the first of the processes that torchrun started; whether this is it."""
    is_first = WorkerPlace.from_environment().is_first
    if is_first:
        say_loading()
    return is_first


def _waiting_workers(options: CalibrateOptions) -> AbstractContextManager[WaitingWorkers]:
    """The other processes of a command, which import what it needs while this one does."""
    check_workers(options)
    return waiting_workers(options.workers - 1, "kvtuner.pipeline.search")


def _print_result(result: SearchResult, *, verbose: bool) -> None:
    from kvtuner.report.layer_strip import Terminal
    from kvtuner.report.search_text import search_text

    report = result.report or f"not written; kvtuner report {result.run_folder} does so"
    text = search_text(result.data, Terminal.of_stdout(), verbose=verbose)
    print(f"{text}\n\nprofile: {result.file}\nreport:  {report}\n")


def _calibrate(args: Namespace) -> int:
    options = options_from(CalibrateOptions, vars(args))
    if args.dry_run:
        return _dry_run(options, as_json=args.json)
    is_first = _begin()
    with _waiting_workers(options) as waiting:
        from kvtuner.pipeline.search import run_calibration

        result = run_calibration(options, waiting=waiting).to_json()
    if not is_first:
        return 0
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        say(f"{result['candidates']} candidates, {result['isolated_kl']} with isolated KL: {result['table']}")
    return 0


def _dry_run(options: CalibrateOptions, *, as_json: bool) -> int:
    from kvtuner.pipeline.dry_run import dry_run_facts, dry_run_lines

    facts = dry_run_facts(options)
    print(json.dumps(facts, indent=1) if as_json else "\n".join(dry_run_lines(facts)))
    return 0


def _add_search_flags(parser: ArgumentParser) -> None:
    _add_flags(parser, SearchOptions, "<budget>")
    add_switch(parser, "--verbose", "print all baselines, at small and at large positions too")


def _add_flags(parser: ArgumentParser, options: type, run_name: str) -> None:
    add_options(parser, options)
    group = parser.add_argument_group("run")
    group.add_argument(
        "--out",
        metavar="FOLDER",
        help=f"run folder; runs/<model>-{run_name} by default. The same command resumes",
    )
    group.add_argument("--config", metavar="FILE.yaml", help="file of flags by name, overlaid by the command line")
    add_switch(group, "--dry-run", "print geometry, bytes per token and forward tokens; load no weights")


COMMANDS: Final = (
    Command("search", "from a model to profile.json and a report", _add_search_flags, _search, resumes=True),
    Command(
        "calibrate",
        "measure sensitivity only; search with the same --out reuses it",
        partial(_add_flags, options=CalibrateOptions, run_name="calibration"),
        _calibrate,
        resumes=True,
    ),
)
