"""Reading a profile that may be hostile: it decides addresses in GPU kernels. Knows nothing of models."""

from pathlib import Path
from typing import Any, Final

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.document import DocumentKind, naming, read_document, short, validated
from kvtuner.exported_configs.profile.field_types import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.profile import SCHEMA_VERSIONS, Profile
from kvtuner.precision import LAYOUT_ID


def load_profile(source: str | Path | bytes, name: Path | None = None) -> Profile:
    """Read and check a profile: its file, or its content, which errors call by `name`.

    The `ProfileError` of a wrong file is one line with its name, the rule and the value.
    """
    with naming(source if name is None else name, PROFILE):
        return validated(Profile, read_document(source, PROFILE), way_out=PROFILE.again)


def _check_version(document: dict[str, Any]) -> None:
    """Name a newer format before its new fields are called unknown."""
    version, newest = document.get("schema_version"), SCHEMA_VERSIONS[-1]
    if type(version) is not int or version < 1:
        raise ProfileError(f"schema_version must be 1 to {newest}, not {short(version)}; this is no profile")
    if version > newest:
        raise ProfileError(f"schema_version is {version}, but this kvtuner reads 1 to {newest}; upgrade kvtuner")
    layout = document.get("layout")
    if layout != LAYOUT_ID:
        raise ProfileError(f"layout must be {LAYOUT_ID!r}, not {short(layout)}; upgrade kvtuner, or export again")


PROFILE: Final = DocumentKind("profile", "export the profile again", MAX_PROFILE_BYTES, check_version=_check_version)
