"""``kvtuner push`` and ``kvtuner pull``: profiles to and from the hub."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner.cli.command import Command, add_switch
from kvtuner.errors import HubError, ProfileError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def _push(args: Namespace) -> int:
    from kvtuner.exported_configs.sharing.push import plan_upload, push
    from kvtuner.exported_configs.sharing.reference import HubReference, parse_repo, profile_names
    from kvtuner.pipeline.progress import say
    from kvtuner.pipeline.published_files import preview_text, published_files, upload_facts

    repo = parse_repo(args.repo)
    files = published_files(
        Path(args.path), repo, license_id=args.license, with_report=args.report, branch=args.revision
    )
    upload = plan_upload(
        repo, files, branch=args.revision, private=args.private, create_pr=args.create_pr, is_preview=args.dry_run
    )
    say(preview_text(upload))
    facts = upload_facts(upload)
    if args.dry_run or not (args.yes or _is_agreed()):
        if args.json:
            print(json.dumps(facts, indent=1))
        else:
            say("nothing was pushed")
        return 0
    names = profile_names(files)
    pushed = push(upload, args.message or f"Upload {', '.join(names)} with kvtuner")
    pulls = [shlex.join(["kvtuner", "pull", str(HubReference(repo, pushed.commit, name))]) for name in names]
    print(json.dumps({**facts, **pushed._asdict()}, indent=1) if args.json else "\n".join([pushed.url, *pulls]))
    return 0


def _is_agreed() -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise HubError("nothing was pushed: nobody can be asked here; add --yes, or --dry-run for the preview alone")
    print("push this? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _pull(args: Namespace) -> int:
    from kvtuner.cli.output_file import check_new, check_new_profile
    from kvtuner.exported_configs.sharing.pull import pull
    from kvtuner.exported_configs.sharing.reference import HubReference, parse_reference
    from kvtuner.exported_configs.signing.signature_bundle import SIGNATURE_SUFFIX
    from kvtuner.pipeline.progress import say
    from kvtuner.pipeline.published_files import copy_fetched
    from kvtuner.report.formatting import printable

    reference = parse_reference(args.reference)
    if not isinstance(reference, HubReference):
        is_here = os.path.exists(args.reference.partition("#")[0])
        there = f"; {args.reference} is on this machine, add @main for the hub's" if is_here else ""
        raise ProfileError(f"{args.reference} is no profile of the hub; write owner/name[@revision][:path]{there}")
    copies = [] if args.out is None else [Path(args.out), Path(args.out + SIGNATURE_SUFFIX)]
    check_new_profile(args.out, force=args.force)
    check_new(args.out and args.out + SIGNATURE_SUFFIX, force=args.force)
    fetched = pull(reference)
    for note in fetched.notes:
        say(note)
    if copies:
        copy_fetched(fetched, *copies)
    profile, at = fetched.profile, fetched.reference
    facts = {
        "file": str(copies[0] if copies else fetched.path),
        "digest": profile.digest,
        "model": profile.model.id,
        "repo": at.repo,
        "commit": at.revision,
        "path": at.path,
        "notes": list(fetched.notes),
    }
    text = f"{facts['file']}: valid, for {printable(profile.model.id)}, from {at.full_name}\n  {profile.digest}"
    print(json.dumps(facts, indent=1) if args.json else text)
    return 0


def _add_push_flags(parser: ArgumentParser) -> None:
    parser.add_argument("path", metavar="PROFILE|RUN", help="profile.json or run folder")
    parser.add_argument("--repo", metavar="OWNER/NAME", required=True, help="hub repository; made if it is not there")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to commit to; the repository's main by default")
    parser.add_argument("--message", metavar="TEXT", help="message of the commit")
    parser.add_argument("--license", default="cc0-1.0", metavar="ID", help="profile's license, as the hub spells it")
    add_switch(parser, "--private", "make a new repository private, and push to no public one")
    add_switch(parser, "--create-pr", "open a pull request instead of committing")
    add_switch(parser, "--report", "upload report.html and its pictures too, where the run has them", default=True)
    add_switch(parser, "--yes", "do not ask after the preview")
    add_switch(parser, "--dry-run", "print the preview only, which needs no network and no token")


def _add_pull_flags(parser: ArgumentParser) -> None:
    parser.add_argument("reference", metavar="OWNER/NAME[@REVISION][:PATH]", help="profile; #sha256:... pins a digest")
    parser.add_argument("--out", metavar="FILE", help="also copy the profile there, with its signature")
    parser.add_argument("--force", action="store_true", help="overwrite --out")


COMMANDS: Final = (
    Command("push", "share a profile on the hub, in one commit, after a preview", _add_push_flags, _push),
    Command("pull", "fetch a profile from the hub, verify and keep it", _add_pull_flags, _pull),
)
