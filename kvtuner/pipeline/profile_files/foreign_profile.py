"""A profile from another tool's file. Nothing is measured, and no code of a model is run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner.calibration.model_loading import ModelShape, ModelSource, read_shape
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats.conversion import ImportOptions, read
from kvtuner.exported_configs.formats.foreign_file import MAX_JSON_BYTES
from kvtuner.report.formatting import printable

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile

_SUFFIXES: Final = (".yaml", ".yml", ".json", ".txt")


def import_profile(
    text: str, file_format: str, *, model: str, revision: str | None = None, **options: Any
) -> tuple[Profile, tuple[str, ...]]:
    """Read another tool's file, or ranges themselves; returns the profile, and notes on what the file left open.

    The format is one of `kvtuner.exported_configs.formats.readable`; `options` are fields of `ImportOptions` that the
    file does not say.

    Raises:
        ProfileError: The file cannot be read, or says what no profile can.
    """
    data = _content(text, file_format)
    source = ModelSource(model, revision)
    shape = read_shape(source)
    identity = shape.identity(source, _dtype(shape))
    import_options = ImportOptions(file_name=os.path.basename(text), model=source.name, **options)
    try:
        return read(data, file_format, shape.geometry, identity, import_options)
    except ProfileError as error:
        raise ProfileError(f"{printable(text[:200])}: {error}") from error


def _content(text: str, file_format: str) -> bytes:
    """The file's bytes; the text itself where ranges are given in place of a file."""
    if file_format == "ranges" and not os.path.exists(text):
        if ":" not in text or os.sep in text or text.lower().endswith(_SUFFIXES):
            raise ProfileError(
                f"there is no file {printable(text[:200])}, and it is no text of ranges such as 0-1:bf16; give either"
            )
        return text.encode(errors="replace")
    try:
        with Path(text).open("rb") as handle:
            return handle.read(MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ProfileError(f"{printable(text[:200])} cannot be read ({reason}); give the path of a file") from error


def _dtype(shape: ModelShape) -> str:
    """The dtype that the checkpoint is in; torch's where its configuration does not say, as transformers loads it."""
    dtype = getattr(shape.config.get_text_config(decoder=True), "dtype", None) or shape.config.dtype or "float32"
    return str(dtype).removeprefix("torch.")
