"""Flags of the commands about a finished profile: to look at it, share it, translate it and trust it.

Knows nothing of what they do. Wherever a profile is named, it may be a file, a run folder, a profile of the hub
(``owner/name[@revision][:path]``) or one of the catalogue (``catalogue:name``), with ``#sha256:...`` to pin its digest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtuner.exported_configs.formats import SCHEMES, readable, writable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

PROFILE_HELP: Final = (
    "profile.json, run folder, owner/name[@revision][:path] of the hub, or catalogue:name; #sha256:... pins"
)


def add_profile_commands(
    commands: Any, *, formatter: type[argparse.HelpFormatter], switch: Callable[..., None]
) -> Iterator[argparse.ArgumentParser]:
    """Add them, and give each.

    Args:
        commands: what argparse's add_subparsers made.
        formatter: of help.
        switch: adds a flag that can be turned off.
    """

    def command(name: str, summary: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = commands.add_parser(
            name, help=summary, description=summary, formatter_class=formatter
        )
        return parser

    report = command("report", "write report.html and its pictures again from a run folder")
    report.add_argument("folder", help="run folder")
    yield report
    yield _show(command("show", "a profile or a finished run, in the terminal or as a page"))
    yield _validate(command("validate", "check a profile's schema, digest and inner consistency"))
    yield _diff(command("diff", "two profiles: layers that changed, bytes, quality"))
    yield _list(command("list", "profiles at hand: the catalogue, the local cache, a folder"))
    yield _push(command("push", "share a profile on the hub, in one commit, after a preview"), switch)
    yield _pull(command("pull", "fetch a profile from the hub, verify and keep it"))
    yield _import(command("import", "a profile from another tool's file"), switch)
    yield _export(command("export", "a profile as another tool's file"), switch)
    yield _sign(command("sign", "sign a profile (OpenSSF model signing)"))
    yield _verify(command("verify", "check a profile's signature"))
    yield command("doctor", "what this machine has, and whether kvtuner can work here")


def _show(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("path", metavar="PROFILE", help=PROFILE_HELP)
    parser.add_argument("--html", metavar="FILE", help="write a page that needs nothing else")
    return parser


def _validate(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("file", metavar="PROFILE", nargs="+", help=PROFILE_HELP)
    parser.add_argument("--model", metavar="ID|FOLDER|demo", help="also check that it fits this model")
    parser.add_argument("--strict", action="store_true", help="nothing may differ: what is warned of is an error")
    parser.add_argument(
        "--allow-derived",
        action="store_true",
        help="a fine-tune, or another configuration with the same geometry, is warned of",
    )
    return parser


def _diff(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("first", metavar="PROFILE", help=PROFILE_HELP)
    parser.add_argument("second", metavar="PROFILE", help="the other one")
    parser.add_argument("--exit-code", action="store_true", help="exit 1 if the layers differ")
    parser.add_argument("--html", metavar="FILE", help="write a page that needs nothing else")
    return parser


def _list(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("folder", nargs="?", help="also the profiles of this folder and those below it")
    parser.add_argument("--model", metavar="ID|FOLDER|demo", help="those that fit this model only")
    return parser


def _push(parser: argparse.ArgumentParser, switch: Callable[..., None]) -> argparse.ArgumentParser:
    parser.add_argument("path", metavar="PROFILE|RUN", help="profile.json or run folder")
    parser.add_argument("--repo", metavar="OWNER/NAME", required=True, help="of the hub; made if it is not there")
    parser.add_argument("--revision", metavar="BRANCH", help="to commit to; the repository's main one by default")
    parser.add_argument("--message", metavar="TEXT", help="of the commit")
    parser.add_argument("--license", default="cc0-1.0", metavar="ID", help="of the profile, as the hub spells it")
    switch(parser, "--private", "make a new repository private")
    switch(parser, "--create-pr", "open a pull request instead of committing")
    switch(parser, "--report", "with report.html and its pictures, where the run has them", default=True)
    switch(parser, "--yes", "do not ask after the preview")
    switch(parser, "--dry-run", "the preview only")
    return parser


def _pull(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("reference", metavar="OWNER/NAME[@REVISION][:PATH]", help="#sha256:... pins its digest")
    parser.add_argument("--out", metavar="FILE", help="also copy the profile there, with its signature")
    parser.add_argument("--force", action="store_true", help="overwrite --out")
    return parser


def _import(parser: argparse.ArgumentParser, switch: Callable[..., None]) -> argparse.ArgumentParser:
    parser.add_argument("source", metavar="SOURCE", help="the file; of ranges also the text, such as 0-1:bf16,2-27:8")
    parser.add_argument("--from", dest="format", required=True, choices=readable(), help="what the file is")
    parser.add_argument("--model", metavar="ID|FOLDER|demo", required=True, help="only its configuration is read")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--scheme", choices=SCHEMES, help="of a preset of KVTuner, if its name does not say it")
    parser.add_argument("--map", metavar="WORD=BITS,...", help="integers in place of other formats: FP8=8,NVFP4=K8V4")
    parser.add_argument("--group-size", type=int, metavar="N", help="channels per scale, in place of the file's")
    parser.add_argument("--default-dtype", metavar="WORD", help="of layers that ranges do not name")
    grid = parser.add_mutually_exclusive_group()
    for flag, value, text in (
        ("--symmetric", True, "grids around zero, where the file does not say"),
        ("--asymmetric", False, "grids with a minimum of their own; without either flag too"),
    ):
        grid.add_argument(flag, dest="symmetric", action="store_const", const=value, help=text)
    parser.add_argument("--out", metavar="FILE", help="write the profile there; to stdout by default")
    switch(parser, "--force", "overwrite the file that --out names")
    return parser


def _export(parser: argparse.ArgumentParser, switch: Callable[..., None]) -> argparse.ArgumentParser:
    parser.add_argument("profile", metavar="PROFILE", help=PROFILE_HELP)
    parser.add_argument("--to", dest="format", required=True, choices=writable(), help="what to write")
    parser.add_argument("--out", metavar="FILE", help="write it there; to stdout by default")
    switch(parser, "--force", "overwrite the file that --out names")
    switch(parser, "--lossy", "drop what the format cannot say, and say what; for ranges and vllm-skip-layers")
    return parser


def _sign(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("path", metavar="PROFILE|RUN", help="profile.json or run folder; writes profile.json.sig")
    parser.add_argument("--private-key", metavar="FILE", help="PEM of a key of P-256, P-384 or P-521")
    parser.add_argument("--password-env", metavar="NAME", help="environment variable with the key's password")
    parser.add_argument("--certificate", metavar="FILE", help="PEM of the key's certificate; the key is not encrypted")
    parser.add_argument("--certificate-chain", metavar="FILE", nargs="+", help="PEMs of those above it, the root's too")
    parser.add_argument("--sigstore", action="store_true", help="no key: log in with a browser; needs the network")
    parser.add_argument("--identity-token-env", metavar="NAME", help="variable with an OpenID token for --sigstore")
    return parser


def _verify(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("path", metavar="PROFILE", help=PROFILE_HELP)
    parser.add_argument(
        "--identity",
        metavar="WHO",
        required=True,
        help="key:PUBLIC.pem, chain:ROOT.pem[,MORE.pem] or sigstore:NAME,https://ISSUER",
    )
    return parser
