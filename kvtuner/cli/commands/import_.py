"""``kvtuner import``: a profile from another tool's file. Nothing is measured, and no code of a model is run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner.calibration.model_loading import ModelSource, read_shape
from kvtuner.cli.output_file import check_new
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats.import_result import ImportOptions, parse_map
from kvtuner.exported_configs.formats.json_source import MAX_JSON_BYTES
from kvtuner.exported_configs.formats.translate import read, to_profile
from kvtuner.exported_configs.profile.build import dump_profile
from kvtuner.pipeline.progress import say
from kvtuner.report.formatting import printable
from kvtuner.report.profile_report import summary
from kvtuner.run_folder import write_atomically

if TYPE_CHECKING:
    from argparse import Namespace

    from kvtuner.calibration.model_loading import ModelShape


_SUFFIXES: Final = (".yaml", ".yml", ".json", ".txt")


def run(args: Namespace) -> int:
    """Run the sub-command."""
    check_new(args.out, force=args.force)
    data = _content(args.source, args.format)
    source = ModelSource(args.model, args.revision)
    shape = read_shape(source)
    options = ImportOptions(
        file_name=os.path.basename(args.source),
        model=source.name,
        scheme=args.scheme,
        words={} if args.map is None else parse_map(args.map),
        group_size=args.group_size,
        default_word=args.default_dtype,
        symmetric=args.symmetric,
    )
    try:
        imported = read(data, args.format, shape.geometry, options)
    except ProfileError as error:
        raise ProfileError(f"{printable(args.source[:200])}: {error}") from error
    profile = to_profile(imported, args.format, shape.geometry, shape.identity(source, _dtype(shape)))
    for note in imported.notes:
        say(f"note: {printable(note)}")
    if not args.out:
        print(dump_profile(profile).decode(), end="")
        return 0
    write_atomically(Path(args.out), dump_profile(profile))
    if args.json:
        print(json.dumps({"file": args.out, "notes": list(imported.notes), **summary(profile)}, indent=1))
    else:
        print(f"{args.out}: {profile.digest}, {float(profile.mean_bits):.4g} mean bits, not measured")
    return 0


def _content(source: str, name: str) -> bytes:
    """The file's bytes; the text itself where ranges are given in place of a file."""
    if name == "ranges" and not os.path.exists(source):
        if ":" not in source or _is_path(source):
            raise ProfileError(
                f"there is no file {printable(source[:200])}, and it is no text of ranges such as 0-1:bf16; give either"
            )
        return source.encode(errors="replace")
    try:
        with Path(source).open("rb") as handle:
            return handle.read(MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ProfileError(f"{printable(source[:200])} cannot be read ({reason}); give the path of a file") from error


def _is_path(source: str) -> bool:
    return os.sep in source or source.lower().endswith(_SUFFIXES)


def _dtype(shape: ModelShape) -> str:
    """The dtype that the checkpoint is in; torch's where its configuration does not say, as transformers loads it."""
    dtype = getattr(shape.config.get_text_config(decoder=True), "dtype", None) or shape.config.dtype or "float32"
    return str(dtype).removeprefix("torch.")
