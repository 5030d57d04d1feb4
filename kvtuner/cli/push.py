"""``kvtuner push``: profiles, their evaluations, report and card to the hub, after a preview, in one commit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner.cli.profile_text import printable
from kvtuner.cli.session import say
from kvtuner.errors import HubError, ProfileError
from kvtuner.exported_configs.card import Shown, card
from kvtuner.exported_configs.evaluation import SUFFIX, evaluation_files, load_evaluation
from kvtuner.exported_configs.find import profile_files
from kvtuner.exported_configs.hub import SIGNATURE_SUFFIX, Upload, look_at_branch, push
from kvtuner.exported_configs.load import load_profile
from kvtuner.exported_configs.reference import PROFILE_FILE, parse_repo

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

README: Final = "README.md"
REPORT: Final = "report.html"
_MAX_PICTURE_BYTES: Final = 4 * 2**20
_MAX_SHOWN_PICTURES: Final = 4


def run(args: Namespace) -> int:
    """Run the sub-command: 0 if it was pushed, or only to be shown."""
    repo = parse_repo(args.repo)
    files = _files(Path(args.path), repo, args)
    head = look_at_branch(repo, args.revision)
    if head.commit is None and args.revision:
        raise HubError(f"{repo} is not there, so it has no branch {args.revision}; leave --revision out to make it")
    upload = Upload(
        repo=repo,
        branch=args.revision,
        head=head,
        files=files,
        removed=_stale(head.files, files),
        private=args.private,
        create_pr=args.create_pr,
    )
    say(_preview(upload))
    if args.dry_run or not _agreed(args):
        if args.json:
            print(json.dumps(_facts(upload), indent=1))
        else:
            say("nothing was pushed")
        return 0
    message = args.message or f"Upload {', '.join(name for name in files if _is_profile(name))} with kvtuner"
    made = push(upload, message)
    if args.json:
        print(json.dumps({**_facts(upload), "commit": made.commit, "url": made.url}, indent=1))
    else:
        print(made.url)
        for name in filter(_is_profile, files):
            print(f"kvtuner pull {repo}@{made.commit}" + ("" if name == PROFILE_FILE else f":{name}"))
    return 0


def _agreed(args: Namespace) -> bool:
    if args.yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise HubError("nothing was pushed: nobody can be asked here; add --yes, or --dry-run for the preview alone")
    print("push this? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _files(path: Path, repo: str, args: Namespace) -> dict[str, bytes]:
    """Content by path in the repository; every profile and evaluation is read and checked first."""
    sources = profile_files(path)
    # One profile is found without being named.
    names = [PROFILE_FILE] if len(sources) == 1 else [source.name for source in sources]
    files: dict[str, bytes] = {}
    shown = []
    for source, name in zip(sources, names, strict=True):
        profile = load_profile(source)
        files[name] = source.read_bytes()
        evaluations = []
        for beside in evaluation_files(source):
            evaluation = load_evaluation(beside)
            if evaluation.profile_digest != profile.digest:
                raise ProfileError(
                    f"{beside.name} evaluates another profile than {source.name}; remove it, or evaluate this one"
                )
            evaluations.append(evaluation)
            files[_beside(beside.name, source, name)] = beside.read_bytes()
        signature = source.with_name(source.name + SIGNATURE_SUFFIX)
        if signature.exists():
            files[name + SIGNATURE_SUFFIX] = signature.read_bytes()
        shown.append(Shown(name, profile, evaluations))
    pictures = _report(path, files) if args.report and path.is_dir() else []
    text = card(repo, shown, license_id=args.license, pictures=pictures[:_MAX_SHOWN_PICTURES])
    return {README: text.encode(), **files}


def _beside(name: str, source: Path, profile: str) -> str:
    """An evaluation's name beside the name that its profile gets."""
    return name.replace(source.stem, profile.removesuffix(".json"), 1)


def _report(folder: Path, files: dict[str, bytes]) -> list[str]:
    """Add the report and its pictures; gives the pictures' paths."""
    report = folder / REPORT
    if report.is_file():
        files[REPORT] = report.read_bytes()
    pictures = [file for file in sorted(folder.glob("*.png")) if file.stat().st_size <= _MAX_PICTURE_BYTES]
    for picture in pictures:
        files[f"pictures/{picture.name}"] = picture.read_bytes()
    return [f"pictures/{picture.name}" for picture in pictures]


def _stale(there: tuple[str, ...], files: Mapping[str, bytes]) -> tuple[str, ...]:
    """What stands there beside a profile that is replaced, and belongs to the old one."""
    stems = [name.removesuffix(".json") for name in files if _is_profile(name)]
    return tuple(
        name
        for name in there
        if name not in files
        and any(name == f"{stem}.json{SIGNATURE_SUFFIX}" or name.startswith(stem + SUFFIX) for stem in stems)
    )


def _is_profile(name: str) -> bool:
    return name.endswith(".json") and SUFFIX not in name


def _preview(upload: Upload) -> str:
    where = f"{upload.repo}" + (f"@{upload.branch}" if upload.branch else "")
    kind = "private" if upload.private else "public"
    onto = f"onto {upload.head.commit}" if upload.head.commit else f"a new {kind} repository"
    lines = [f"{where}: {onto}" + (", as a pull request" if upload.create_pr else "")]
    lines += [
        f"  {'replaces' if name in upload.head.files else 'adds    '} {printable(name)}  {len(data):,} bytes"
        for name, data in upload.files.items()
    ]
    lines += [f"  removes  {printable(name)}" for name in upload.removed]
    readme = upload.files[README].decode()
    return "\n".join([*lines, "", *(f"  | {printable(line)}" for line in readme.splitlines()), ""])


def _facts(upload: Upload) -> dict[str, Any]:
    return {
        "repo": upload.repo,
        "branch": upload.branch,
        "parent": upload.head.commit,
        "files": {name: len(data) for name, data in upload.files.items()},
        "removed": list(upload.removed),
        "card": upload.files[README].decode(),
    }
