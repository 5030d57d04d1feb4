"""``kvtuner import`` and ``kvtuner export``: profiles from and to the files of other tools, and written anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner.cli.command import Command, add_profile, add_switch, flag_type
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats import PRESETS, readable, writable
from kvtuner.pipeline.flags.number_readers import whole_number
from kvtuner.precision import CONSTANTS_PLACES

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from kvtuner.exported_configs.profile.profile import Profile


OWN_FORMAT: Final = "kvtuner"
"""The name under which a profile is written anew, in its own format."""


def _import(args: Namespace) -> int:
    from kvtuner.cli.output_file import check_new_profile
    from kvtuner.exported_configs.formats.conversion import parse_map
    from kvtuner.exported_configs.profile.build import dump_profile, write_profile
    from kvtuner.pipeline.profile_lookup import import_profile
    from kvtuner.report.profile_report import summary

    check_new_profile(args.out, force=args.force)
    profile, notes = import_profile(
        args.source,
        args.format,
        model=args.model,
        revision=args.revision,
        scheme=args.scheme,
        words={} if args.map is None else parse_map(args.map),
        group_size=args.group_size,
        default_word=args.default_dtype,
        symmetric=args.symmetric,
    )
    _say_notes(notes)
    if not args.out:
        print(dump_profile(profile).decode(), end="")
        return 0
    write_profile(Path(args.out), profile)
    facts = {"file": args.out, "notes": list(notes), **summary(profile)}
    text = f"{args.out}: {profile.digest}, {float(profile.mean_bits):.4g} mean bits, not measured"
    print(json.dumps(facts, indent=1) if args.json else text)
    return 0


def _export(args: Namespace) -> int:
    from kvtuner.cli.output_file import check_new
    from kvtuner.exported_configs.formats.conversion import write
    from kvtuner.pipeline.profile_lookup import profile_of
    from kvtuner.run_folder import write_atomically

    check_new(args.out, force=args.force)
    profile = profile_of(args.profile).profile
    if args.format == OWN_FORMAT:
        return _rewrite(profile, args)
    if args.constants is not None:
        raise ProfileError(f"--constants is for --to {OWN_FORMAT}: no other tool's file has them; leave it out")
    exported = write(profile, args.format, lossy=args.lossy)
    _say_notes(exported.notes)
    if args.out:
        write_atomically(Path(args.out), exported.text)
    if args.json:
        facts = {"format": args.format, "file": args.out, "digest": profile.digest, "notes": list(exported.notes)}
        print(json.dumps({**facts, "text": exported.text}, indent=1))
    elif args.out:
        print(f"{args.out}: {args.format} of {profile.digest}")
    else:
        print(exported.text, end="")
    return 0


def _rewrite(profile: Profile, args: Namespace) -> int:
    """Write a profile of this format anew, with its constants where they were asked for."""
    from kvtuner.cli.output_file import check_new_profile
    from kvtuner.exported_configs.profile.build import write_profile
    from kvtuner.exported_configs.profile.constants_file import constants_path
    from kvtuner.pipeline.placed_constants import place_as_asked

    if not args.out or args.lossy:
        raise ProfileError(f"--to {OWN_FORMAT} loses nothing and may write two files: give --out, and no --lossy")
    check_new_profile(args.out, force=args.force)
    placed = place_as_asked(profile, args.constants or "auto")
    write_profile(Path(args.out), placed)
    files = [args.out] + ([str(constants_path(Path(args.out)))] if placed.constants_sha256 else [])
    facts = {"format": OWN_FORMAT, "file": args.out, "files": files, "digest": placed.digest}
    print(json.dumps(facts, indent=1) if args.json else f"{', '.join(files)}: {placed.digest}")
    return 0


def _say_notes(notes: tuple[str, ...]) -> None:
    from kvtuner.pipeline.progress import say
    from kvtuner.report.formatting import printable

    for note in notes:
        say(f"note: {printable(note)}")


def _add_import_flags(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="file; for ranges also the text, such as 0-1:bf16,2-27:8")
    parser.add_argument("--from", dest="format", required=True, choices=readable(), help="format of the file")
    parser.add_argument("--model", metavar="ID|FOLDER|demo", required=True, help="model whose configuration is read")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--scheme", choices=PRESETS, help="scheme of a preset of KVTuner, if its name does not say it")
    parser.add_argument("--map", metavar="WORD=BITS,...", help="integers in place of other formats: FP8=8,NVFP4=K8V4")
    parser.add_argument(
        "--group-size", type=flag_type(whole_number), metavar="N", help="channels per scale, in place of the file's"
    )
    parser.add_argument("--default-dtype", metavar="WORD", help="precision of layers that ranges do not name")
    grid = parser.add_mutually_exclusive_group()
    for flag, value, text in (
        ("--symmetric", True, "grids around zero, where the file does not say"),
        ("--asymmetric", False, "grids with a minimum of their own; without either flag too"),
    ):
        grid.add_argument(flag, dest="symmetric", action="store_const", const=value, help=text)
    parser.add_argument("--out", metavar="FILE", help="write the profile there; to stdout by default")
    add_switch(parser, "--force", "overwrite the file that --out names")


def _add_export_flags(parser: ArgumentParser) -> None:
    add_profile(parser, "profile")
    parser.add_argument("--to", dest="format", required=True, choices=(*writable(), OWN_FORMAT), help="format to write")
    parser.add_argument("--constants", choices=CONSTANTS_PLACES, help=f"place of mu and lambda, for --to {OWN_FORMAT}")
    parser.add_argument("--out", metavar="FILE", help="write it there; to stdout by default")
    add_switch(parser, "--force", "overwrite the file that --out names")
    add_switch(
        parser,
        "--lossy",
        "drop what the format cannot say, and say what; for kvtuner-yaml, ranges and vllm-skip-layers",
    )


COMMANDS: Final = (
    Command("import", "a profile from another tool's file", _add_import_flags, _import),
    Command("export", "a profile as another tool's file", _add_export_flags, _export),
)
