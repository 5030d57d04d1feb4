"""``kvtuner report``: the HTML report and its pictures again, from what a run folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvtuner.errors import RunFolderError
from kvtuner.report.search_data import DATA_FILE, ReportData
from kvtuner.report.search_report import summary_json, terminal_table, write_report
from kvtuner.run_folder import RunFolder

if TYPE_CHECKING:
    from argparse import Namespace


def report_folders(path: Path) -> list[Path]:
    """Folders of a run that hold report data: its own, and one per budget where it had several.

    Raises:
        RunFolderError: none does.
    """
    folders = [file.parent for file in (path / DATA_FILE, *sorted(path.glob(f"report-*/{DATA_FILE}"))) if file.exists()]
    if not folders:
        raise RunFolderError(f"{path} holds no {DATA_FILE}; run `kvtuner search --out {path}` to its end first")
    return folders


def run(args: Namespace) -> int:
    """Run the sub-command."""
    results = []
    for folder in report_folders(Path(args.folder)):
        data = ReportData.from_json(RunFolder(folder).read_checked(DATA_FILE))
        page = write_report(data, folder)
        results.append({"report": str(page), **summary_json(data)})
        if not args.json:
            print(terminal_table(data))
            print(f"\nreport: {page}")
    if args.json:
        print(json.dumps(results[0] if len(results) == 1 else results, indent=1))
    return 0
