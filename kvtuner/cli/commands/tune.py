"""``kvtuner search`` and ``kvtuner calibrate``: from a model to profiles, or to the sensitivity table alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from kvtuner.cli import flag_types
from kvtuner.cli.command import Command
from kvtuner.cli.shared_flags import add_data_flags, add_model_flags, add_switch
from kvtuner.pipeline.options import (
    DEFAULT_SAMPLER,
    DEFAULT_TRIALS,
    READ_PLANS,
    SAMPLERS,
    SCORES,
    CalibrateOptions,
    SearchOptions,
    defaults_of,
    options_from,
)

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from kvtuner.pipeline.search import SearchResult

_DEFAULTS: Final = defaults_of(SearchOptions)


def _search(args: Namespace) -> int:
    from kvtuner.pipeline.search import search

    options = options_from(SearchOptions, vars(args))
    if args.dry_run:
        return _dry_run(options, as_json=args.json)
    results = search(options, on_result=None if args.json else _print_result)
    if args.json:
        printed = [result.to_json() for result in results]
        print(json.dumps(printed[0] if len(printed) == 1 else printed, indent=1))
    return 0


def _print_result(result: SearchResult) -> None:
    from kvtuner.report.search_report import terminal_table

    report = result.report or f"not written; kvtuner report {result.run_folder} does so"
    print(f"{terminal_table(result.data)}\n\nprofile: {result.file}\nreport:  {report}\n")


def _calibrate(args: Namespace) -> int:
    from kvtuner.pipeline.calibrate import calibrate
    from kvtuner.pipeline.progress import say

    options = options_from(CalibrateOptions, vars(args))
    if args.dry_run:
        return _dry_run(options, as_json=args.json)
    result = calibrate(options).to_json()
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        say(f"{result['candidates']} candidates, {result['isolated_kl']} with isolated KL: {result['table']}")
    return 0


def _dry_run(options: CalibrateOptions, *, as_json: bool) -> int:
    from kvtuner.pipeline.dry_run import plan_lines, plan_of_work

    plan = plan_of_work(options)
    print(json.dumps(plan, indent=1) if as_json else "\n".join(plan_lines(plan)))
    return 0


def _add_search_flags(parser: ArgumentParser) -> None:
    add_model_flags(parser)
    add_data_flags(parser)
    _add_measurement(parser)
    _add_search(parser)
    _add_run(parser)


def _add_calibrate_flags(parser: ArgumentParser) -> None:
    add_model_flags(parser)
    add_data_flags(parser)
    _add_measurement(parser)
    _add_run(parser)


def _add_measurement(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--score",
        choices=SCORES,
        default=_DEFAULTS["score"],
        help="what bits are allocated by; fisher and e_o skip the isolated forwards",
    )
    group.add_argument(
        "--read-plan",
        choices=READ_PLANS,
        default=_DEFAULTS["read_plan"],
        help="which tokens read quantized keys and values",
    )
    group.add_argument(
        "--fisher-draws",
        type=flag_types.positive,
        default=_DEFAULTS["fisher_draws"],
        metavar="R",
        help="sampled labels per token",
    )
    group.add_argument(
        "--batch-size", type=flag_types.positive, default=_DEFAULTS["batch_size"], help="sequences in flight"
    )
    for side, name in (("k", "keys"), ("v", "values")):
        group.add_argument(
            f"--{side}-group-size",
            type=flag_types.positive,
            metavar="CHANNELS",
            help=f"channels per scale of {name}; head_dim by default",
        )
    add_switch(group, "--symmetric", "one grid around zero instead of minimum and scale")
    add_switch(group, "--pairs", "also measure the paper's e_o of all K/V pairs")
    group.add_argument(
        "--seed",
        type=flag_types.seed,
        default=_DEFAULTS["seed"],
        help="of documents, offsets, labels, sampler and bootstrap",
    )


def _add_search(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument(
        "--budget",
        nargs="+",
        action="extend",
        default=[],
        metavar="BUDGET",
        help="4bit, 4.25bpe, 35%%, 18KiB/token, 40GiB@32x64k; several make several profiles",
    )
    group.add_argument(
        "--layers", metavar="RANGES", help="write this configuration instead of searching: 0-1:bf16,2-27:K4V2"
    )
    group.add_argument("--keep", metavar="LAYERS", help="force layers: 0:K8V8,27:16")
    add_switch(group, "--groups", "tie layers by DBSCAN as the KVTuner paper does")
    group.add_argument(
        "--sampler",
        choices=SAMPLERS,
        help=f"of the refinement; none measures the warm starts only; {DEFAULT_SAMPLER} by default",
    )
    group.add_argument(
        "--trials",
        type=flag_types.positive,
        help=f"of the refinement, warm starts included; {DEFAULT_TRIALS} by default",
    )
    add_switch(group, "--nested", "a larger budget never takes bits away; needs --sampler none")
    group.add_argument(
        "--tp-size",
        type=flag_types.positive,
        default=_DEFAULTS["tp_size"],
        help="tensor-parallel ranks that will serve",
    )
    group.add_argument(
        "--pp-size",
        type=flag_types.positive,
        default=_DEFAULTS["pp_size"],
        help="pipeline stages that will serve; each keeps the budget",
    )
    add_switch(
        group,
        "--report",
        "write report.html and its pictures (`kvtuner report` does so later)",
        default=_DEFAULTS["report"],
    )
    group.add_argument(
        "--storage",
        metavar="URL",
        help="Optuna storage to share between workers; SQLite in the run folder by default",
    )


def _add_run(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--out",
        metavar="FOLDER",
        help="run folder; runs/<model>-<budget> by default. The same command resumes",
    )
    group.add_argument("--config", metavar="FILE.yaml", help="flags by name, overlaid by the command line")
    add_switch(group, "--dry-run", "geometry, bytes per token and forward tokens; loads no weights")


COMMANDS: Final = (
    Command("search", "from a model to profile.json and a report", _add_search_flags, _search),
    Command(
        "calibrate", "measure sensitivity only; search with the same --out reuses it", _add_calibrate_flags, _calibrate
    ),
)
