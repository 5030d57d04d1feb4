"""``kvtuner report`` and ``kvtuner show``: a finished run, or a profile, in the terminal and as a page."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner.cli.command import Command, add_options, add_profile, add_switch
from kvtuner.pipeline.flags.option_fields import options_from
from kvtuner.pipeline.planning.fit_options import FitOptions

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.evaluation_record import Evaluation
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.report.layer_strip import Terminal
    from kvtuner.report.plots.tokens_that_fit import FittedMemory
    from kvtuner.report.search_data import ReportData

REPORT_FOLDER: Final = "report"
"""The beginning of the names of the folders that hold the reports of a run of several budgets."""


def _report(args: Namespace) -> int:
    options = options_from(FitOptions, vars(args))
    from kvtuner.report.layer_strip import Terminal
    from kvtuner.report.search_data import DATA_FILE, ReportData
    from kvtuner.report.search_report import summary_json, write_search_report
    from kvtuner.report.search_text import search_text
    from kvtuner.run_folder import RunFolder

    results = []
    for folder in _report_folders(Path(args.folder)):
        data = ReportData.from_json(RunFolder(folder).read_checked(DATA_FILE))
        fit = _fit(options, data, folder)
        page = write_search_report(data, folder, fit)
        fits = {} if fit is None else {"fit": fit.to_json()}
        results.append({"report": str(page), **summary_json(data), **fits})
        if not args.json:
            terminal = Terminal.of_stdout()
            parts = [search_text(data, terminal, verbose=args.verbose), *_fit_text(fit, terminal), f"report: {page}"]
            print("\n\n".join(parts))
    if args.json:
        print(json.dumps(results[0] if len(results) == 1 else results, indent=1))
    return 0


def _fit(options: FitOptions, data: ReportData, folder: Path) -> FittedMemory | None:
    """What fits the GPUs of the options; None where none are given."""
    if not options.is_asked:
        return None
    from kvtuner.pipeline.planning.report_fit import gpu_fit

    return gpu_fit(options, data, _profile_file(folder))


def _profile_file(folder: Path) -> Path:
    """The profile of a report: beside it, or for one of several budgets beside the report's folder."""
    own, folder = folder / "profile.json", folder.absolute()
    if own.exists() or not folder.name.startswith(f"{REPORT_FOLDER}-"):
        return own
    return folder.parent / f"profile{folder.name.removeprefix(REPORT_FOLDER)}.json"


def _fit_text(fit: FittedMemory | None, terminal: Terminal) -> list[str]:
    if fit is None:
        return []
    caption = textwrap.wrap(f"What fits{fit.caption}.", terminal.width, break_on_hyphens=False)
    return ["\n".join([*caption, "", *fit.table().lines(terminal.width)])]


def _report_folders(path: Path) -> list[Path]:
    """The folders of a run that hold report data: its own, and one per budget where it had several."""
    from kvtuner.errors import RunFolderError
    from kvtuner.report.search_data import DATA_FILE

    files = [path / DATA_FILE, *sorted(path.glob(f"{REPORT_FOLDER}-*/{DATA_FILE}"))]
    folders = [file.parent for file in files if file.exists()]
    if not folders:
        raise RunFolderError(f"{path} holds no {DATA_FILE}; run kvtuner search --out {path} to its end first")
    return folders


def _show(args: Namespace) -> int:
    from kvtuner.cli.output_file import write_page
    from kvtuner.exported_configs.profile.evaluation_record import EvaluatedProfile
    from kvtuner.pipeline.profile_lookup import profiles_of
    from kvtuner.report.profile_report import profile_page, summary

    profiles = [(resolved, _evaluations(resolved.path, resolved.profile)) for resolved in profiles_of(args.path)]
    if args.html:
        shown = [
            EvaluatedProfile(
                file.name,
                file.reference,
                file.profile,
                tuple(evaluations),
                has_relative_path=file.is_own and not file.path.is_absolute(),
            )
            for file, evaluations in profiles
        ]
        write_page(Path(args.html), profile_page(shown))
    if args.json:
        page = {"page": args.html} if args.html else {}
        facts = [
            {
                **summary(resolved.profile),
                "evaluations": [evaluation.to_json() for evaluation in evaluations],
                **page,
            }
            for resolved, evaluations in profiles
        ]
        print(json.dumps(facts[0] if len(facts) == 1 else facts, indent=1))
        return 0
    print("\n\n".join(_lines(resolved.profile, evaluations) for resolved, evaluations in profiles))
    if args.html:
        print(f"\npage: {args.html}")
    return 0


def _lines(profile: Profile, evaluations: Sequence[Evaluation]) -> str:
    from kvtuner.exported_configs.verdict import verdict_of
    from kvtuner.report.evaluation_report import evaluation_lines
    from kvtuner.report.formatting import printable
    from kvtuner.report.layer_strip import Terminal, profile_strip
    from kvtuner.report.profile_report import describe
    from kvtuner.report.search_text import verdict_lines

    terminal = Terminal.of_stdout()
    parts = ["\n".join(profile_strip(profile, terminal)), describe(profile, terminal.width)]
    parts += [
        "\n".join(map(printable, evaluation_lines(evaluation, profile, terminal.width))) for evaluation in evaluations
    ]
    if (verdict := verdict_of(profile)) is not None:
        parts.append("\n".join(verdict_lines(verdict, terminal.width)))
    return "\n\n".join(parts)


def _evaluations(path: Path, profile: Profile) -> list[Evaluation]:
    """Evaluations of this profile beside its file; one that cannot be read is named and left out."""
    from kvtuner.errors import ProfileError
    from kvtuner.exported_configs.profile.evaluation_record import evaluation_files, load_evaluation
    from kvtuner.pipeline.progress import say
    from kvtuner.report.formatting import printable

    evaluations = []
    for file in evaluation_files(path):
        try:
            evaluation = load_evaluation(file)
        except ProfileError as error:
            say(f"not shown: {printable(str(error))}")
            continue
        if evaluation.profile_digest == profile.digest:
            evaluations.append(evaluation)
    return evaluations


def _add_report_flags(parser: ArgumentParser) -> None:
    parser.add_argument("folder", help="run folder, or the folder of the report of one of its budgets")
    add_switch(parser, "--verbose", "print all baselines, at small and at large positions too")
    add_options(parser, FitOptions)


def _add_show_flags(parser: ArgumentParser) -> None:
    add_profile(parser, "path")
    parser.add_argument("--html", metavar="FILE", help="write a page that needs nothing else")


COMMANDS: Final = (
    Command("report", "write report.html and its pictures again from a run folder", _add_report_flags, _report),
    Command("show", "a profile or a finished run, in the terminal or as a page", _add_show_flags, _show),
)
