"""``kvtuner push``: profiles, their evaluations, report and card to the hub, after a preview, in one commit."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import HubError, ProfileError, SignatureError
from kvtuner.exported_configs.profile.evaluation_record import EVALUATION, SUFFIX, evaluation_files, parse_evaluation
from kvtuner.exported_configs.profile.fields import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.card import CardProfile, card
from kvtuner.exported_configs.sharing.find import profile_files
from kvtuner.exported_configs.sharing.reference import PROFILE_FILE, parse_repo
from kvtuner.exported_configs.sharing.upload import Upload, look_at_branch, push
from kvtuner.exported_configs.signing.signature_bundle import SIGNATURE, read_bundle
from kvtuner.exported_configs.signing.signature_bundle import SUFFIX as SIGNATURE_SUFFIX
from kvtuner.pipeline.progress import say
from kvtuner.report.formatting import printable

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from kvtuner.exported_configs.profile.evaluation_record import Evaluation

README: Final = "README.md"
REPORT: Final = "report.html"
_MAX_REPORT_BYTES: Final = 2**25
_MAX_PICTURE_BYTES: Final = 2**22
_MAX_SHOWN_PICTURES: Final = 4
_PNG: Final = b"\x89PNG\r\n\x1a\n"


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
            reference = f"{repo}@{made.commit}" + ("" if name == PROFILE_FILE else f":{name}")
            print(shlex.join(["kvtuner", "pull", reference]))
    return 0


def _agreed(args: Namespace) -> bool:
    if args.yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise HubError("nothing was pushed: nobody can be asked here; add --yes, or --dry-run for the preview alone")
    print("push this? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _files(path: Path, repo: str, args: Namespace) -> dict[str, bytes]:
    """Content by path in the repository. What is sent is what was checked."""
    sources = profile_files(path)
    # One profile is found without being named.
    names = [PROFILE_FILE] if len(sources) == 1 else [source.name for source in sources]
    files: dict[str, bytes] = {}
    shown = []
    for source, name in zip(sources, names, strict=True):
        data = files[name] = _read(source, MAX_PROFILE_BYTES)
        profile = load_profile(data, source)
        evaluations = _evaluations(source, profile.digest)
        for file, (_, content) in evaluations.items():
            # Beside the name that its profile gets.
            files[file.replace(source.stem, name.removesuffix(".json"), 1)] = content
        signature = source.with_name(source.name + SIGNATURE_SUFFIX)
        if signature.exists():
            files[name + SIGNATURE_SUFFIX] = _signature(signature, data)
        shown.append(CardProfile(name, profile, [evaluation for evaluation, _ in evaluations.values()]))
    pictures = []
    if args.report and path.is_dir():
        pictures = [picture for source in sources for picture in _report(path, source.stem, files)]
    text = card(repo, shown, license_id=args.license, pictures=pictures[:_MAX_SHOWN_PICTURES])
    return {README: text.encode(), **files}


def _evaluations(source: Path, digest: str) -> dict[str, tuple[Evaluation, bytes]]:
    """Of a profile, beside its file, with their bytes."""
    found = {}
    for file in evaluation_files(source):
        data = _read(file, EVALUATION.max_bytes)
        try:
            evaluation = parse_evaluation(data)
        except ProfileError as error:
            raise ProfileError(f"{file}: {error}") from error
        if evaluation.profile_digest != digest:
            raise ProfileError(
                f"{file.name} evaluates another profile than {source.name}; remove it, or evaluate this one"
            )
        found[file.name] = evaluation, data
    return found


def _signature(path: Path, signed: bytes) -> bytes:
    """A signature that is of these bytes; whose it is, whoever pulls may ask."""
    data = _read(path, SIGNATURE.max_bytes)
    if read_bundle(data).sha256 != hashlib.sha256(signed).hexdigest():
        raise SignatureError(f"{path} signs another content than the profile has now; sign it again, or remove it")
    return data


def _report(run: Path, profile: str, files: dict[str, bytes]) -> list[str]:
    """Add the report of a run's profile and its own pictures; gives the pictures' paths."""
    from kvtuner.report.plots.search_plots import PICTURES  # matplotlib is not for every push

    # A run of several profiles has a folder for each one's report.
    suffix = profile.removeprefix("profile")
    folder, prefix = (run / f"report{suffix}", f"report{suffix}/") if suffix else (run, "")
    report = folder / REPORT
    if report.exists():
        files[prefix + REPORT] = _read(report, _MAX_REPORT_BYTES)
    pictures = {f"{prefix}pictures/{name}.png": folder / f"{name}.png" for name in PICTURES}
    pictures = {place: picture for place, picture in pictures.items() if picture.exists()}
    for place, picture in pictures.items():
        files[place] = _read(picture, _MAX_PICTURE_BYTES)
        if not files[place].startswith(_PNG):
            raise ProfileError(f"{picture} is no picture of a report; write the report again, or push --no-report")
    return list(pictures)


def _read(path: Path, limit: int) -> bytes:
    """A file's content; a link could publish what lies elsewhere."""
    if path.is_symlink():
        raise ProfileError(f"{path} is a link, and a push takes files only; push what it points to")
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        reason = error.strerror or error
        raise ProfileError(f"{path} cannot be read ({reason}); name a profile or a run folder") from error
    if len(data) > limit:
        raise ProfileError(f"{path} is larger than {limit} bytes; push without it")
    return data


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
