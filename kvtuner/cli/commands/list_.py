"""``kvtuner list``: profiles at hand, of the catalogue, the cache and a folder."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.identity.mismatch import Policy
from kvtuner.exported_configs.profile.evaluation_record import SUFFIX
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.catalogue import catalogue_file, load_index
from kvtuner.exported_configs.sharing.profile_store import all_stored
from kvtuner.report.formatting import printable

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from kvtuner.exported_configs.profile.profile import Profile

_COLUMNS: Final = ("profile", "model", "budget", "bits", "B/token", "of bf16", "KL", "digest")
_SKIPPED: Final = {".git", "node_modules", "__pycache__"}


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    where: str
    profile: Profile


def run(args: Namespace) -> int:
    """Run the sub-command."""
    rows = [*_catalogue(), *_cache(), *(_folder(Path(args.folder)) if args.folder else ())]
    if args.model:
        rows = _fitting(rows, args.model)
    if args.json:
        print(json.dumps([_facts(row) for row in rows], indent=1))
    elif not rows:
        print("no profiles" + (f" that fit {args.model}" if args.model else ""))
    else:
        _print(rows)
    return 0


def _catalogue() -> Iterator[_Row]:
    for entry in load_index().profiles:
        yield _Row(f"catalogue:{entry.name}", "catalogue", load_profile(catalogue_file(entry.name)))


def _cache() -> Iterator[_Row]:
    for each in all_stored():
        try:
            yield _Row(str(each.origin), "cache", each.load())
        except ProfileError as error:
            print(f"not shown: {printable(str(error))}", file=sys.stderr)


def _folder(top: Path) -> Iterator[_Row]:
    """Profiles below a folder; other JSON files are none of ours."""
    if not top.is_dir():
        raise ProfileError(f"{top} is no folder; name one, or leave it out")
    for folder, names, files in os.walk(top):
        names[:] = sorted(set(names) - _SKIPPED)
        for name in sorted(files):
            if not (name.startswith("profile") and name.endswith(".json")) or SUFFIX in name:
                continue
            path = Path(folder, name)
            try:
                yield _Row(str(path), "folder", load_profile(path))
            except ProfileError as error:
                print(f"not shown: {printable(str(error))}", file=sys.stderr)


def _fitting(rows: list[_Row], model: str) -> list[_Row]:
    """Those that `kvtuner validate --model` finds nothing against."""
    from kvtuner.cli.commands.validate import mismatches

    fitting = []
    for row in rows:
        try:
            found = mismatches(row.profile, model, Policy())
        except ProfileError:
            continue  # another geometry
        if all(each.severity != "error" for each in found):
            fitting.append(row)
    return fitting


def _facts(row: _Row) -> dict[str, Any]:
    profile = row.profile
    quality = profile.quality
    return {
        "name": row.name,
        "where": row.where,
        "model": profile.model.id,
        "budget": profile.budget.asked,
        "mean_bits": profile.budget.mean_bits,
        "bytes_per_token": profile.bytes_per_token(),
        "bf16_bytes_per_token": profile.to_geometry().bf16_bytes_per_token(),
        "kl": None if quality is None else quality.measured_kl.mean,
        "digest": profile.digest,
    }


def _print(rows: list[_Row]) -> None:
    cells = [_COLUMNS]
    for facts in map(_facts, rows):
        cells.append(
            (
                printable(facts["name"]),
                printable(facts["model"]),
                printable(facts["budget"]),
                f"{facts['mean_bits']:.3g}",
                f"{facts['bytes_per_token']:,}",
                f"{facts['bytes_per_token'] / facts['bf16_bytes_per_token']:.1%}",
                "" if facts["kl"] is None else f"{facts['kl']:.3g}",
                facts["digest"].removeprefix("sha256:")[:12],
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
