"""Profiles by their names, at hand, or from another tool's file, and whether one fits a model. Loads no weights."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner.calibration.model_loading import ModelShape, ModelSource, read_config, read_shape
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats.conversion import ImportOptions, read
from kvtuner.exported_configs.formats.foreign_file import MAX_JSON_BYTES
from kvtuner.exported_configs.identity.mismatch import Mismatch, Policy, compare_models
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.exported_configs.profile.document import first_bytes
from kvtuner.exported_configs.profile.field_types import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.catalogue import load_index
from kvtuner.exported_configs.sharing.profile_store import all_stored
from kvtuner.exported_configs.sharing.reference import (
    ResolvedProfile,
    find_profile,
    find_profiles,
    profile_names,
)
from kvtuner.pipeline.progress import say
from kvtuner.report.formatting import printable
from kvtuner.runtime_loader.model_check import calibrated_positions, check_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtuner.exported_configs.profile.profile import Profile

_SKIPPED: Final = {".git", "node_modules", "__pycache__"}
_FIELDS: Final = ("schema_version", "digest", "layout", "geometry")
"""Fields of every profile, together in no other tool's JSON."""
_SUFFIXES: Final = (".yaml", ".yml", ".json", ".txt")


def profile_of(text: str) -> ResolvedProfile:
    """The one profile that a name stands for; notes on how it was found go to stderr."""
    return _with_notes([find_profile(text)])[0]


def profiles_of(text: str) -> list[ResolvedProfile]:
    """All profiles that a name stands for: a run folder may hold several."""
    return _with_notes(find_profiles(text))


def _with_notes(profiles: list[ResolvedProfile]) -> list[ResolvedProfile]:
    for profile in profiles:
        for note in profile.notes:
            say(note)
    return profiles


def list_profiles(folder: Path | None, *, model: str | None = None) -> list[ResolvedProfile]:
    """Profiles at hand, and of a folder, that fit a model; a file that is no valid profile is named on stderr."""
    names = [entry.name for entry in load_index().profiles]
    profiles = [find_profile(f"catalogue:{name}") for name in names]
    profiles += [
        ResolvedProfile(stored.path, stored.profile, stored.reference.full_name, "cache") for stored in all_stored()
    ]
    profiles += _below(folder) if folder else ()
    return profiles if model is None else [listed for listed in profiles if _fits(listed.profile, model)]


def _below(top: Path) -> Iterator[ResolvedProfile]:
    if not top.is_dir():
        raise ProfileError(f"{top} is no folder; name one, or leave it out")
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(set(folders) - _SKIPPED)
        for name in sorted(profile_names(files)):
            path = Path(folder, name)
            if not _is_called_a_profile(path):
                continue
            try:
                yield ResolvedProfile(path, load_profile(path), str(path), "folder")
            except ProfileError as error:
                say(f"not shown: {printable(str(error))}")


def _is_called_a_profile(path: Path) -> bool:
    """Whether a file is one by its name, as a search writes it, or has the fields of every profile and no schema's."""
    if fnmatch.fnmatch(path.name, "profile*.json"):
        return True
    try:
        data = first_bytes(path, MAX_PROFILE_BYTES)
    except OSError:
        return False
    return all(f'"{field}"'.encode() in data for field in _FIELDS) and b'"$defs"' not in data


def _fits(profile: Profile, model: str) -> bool:
    """Whether `kvtuner validate --model` finds nothing against a profile."""
    try:
        mismatches = model_mismatches(profile, model, Policy())
    except ProfileError:  # another geometry
        return False
    return all(mismatch.severity != "error" for mismatch in mismatches)


def model_mismatches(profile: Profile, model: str, policy: Policy) -> list[Mismatch]:
    """The mismatches between a profile and a model, by the model's configuration and files alone."""
    source = ModelSource(model)
    config = read_config(source)
    check_model(profile, config)
    identity = identity_of(config, id=model, revision=None, dtype=profile.model.dtype, files=source.path)
    positions = calibrated_positions(profile)
    return compare_models(profile.model, identity, policy, positions=positions, context_length=identity.max_positions)


def import_profile(
    text: str, file_format: str, *, model: str, revision: str | None = None, **options: Any
) -> tuple[Profile, tuple[str, ...]]:
    """Read another tool's file, or ranges themselves; returns the profile, and notes on what the file left open.

    The format is one of `kvtuner.exported_configs.formats.readable`; `options` are fields of `ImportOptions` that the
    file does not say. What cannot be read, or no profile can hold, is refused with `ProfileError`.
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
        return first_bytes(Path(text), MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ProfileError(f"{printable(text[:200])} cannot be read ({reason}); give the path of a file") from error


def _dtype(shape: ModelShape) -> str:
    """The dtype that the checkpoint is in; torch's where its configuration does not say, as transformers loads it."""
    dtype = getattr(shape.config.get_text_config(decoder=True), "dtype", None) or shape.config.dtype or "float32"
    return str(dtype).removeprefix("torch.")
