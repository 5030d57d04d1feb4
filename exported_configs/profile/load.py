"""Reading a profile that may be hostile: it decides addresses in GPU kernels. Knows nothing of models."""

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.constants_file import (
    constants_path,
    decode_constants,
    read_constants_file,
    tensor_place,
)
from kvtuner.exported_configs.profile.document import DocumentKind, naming, read_document, short, validated
from kvtuner.exported_configs.profile.field_types import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.profile.versions import SCHEMA_VERSIONS
from kvtuner.precision import LAYOUT_ID


def load_profile(
    source: str | Path | bytes, name: Path | None = None, *, read_constants: Callable[[], bytes] | None = None
) -> Profile:
    """Read and check a profile: its file, or its content, which was read from the file `name`.

    A side file with its constants is read beside that file, or by `read_constants`, if the profile has one.
    The `ProfileError` of a wrong file is one line with its name, the rule and the value.
    """
    path = Path(source) if name is None and not isinstance(source, bytes) else name
    with naming(source if name is None else name, PROFILE):
        document = read_document(source, PROFILE)
        if document.get("constants_sha256") is not None:
            if read_constants is None and path is not None:
                read_constants = partial(read_constants_file, path)
            _attach(document, read_constants)
        elif path is not None and os.path.lexists(constants_path(path)):
            raise ProfileError(
                f"{constants_path(path).name} stands beside it, but the profile has no constants_sha256: it is of"
                " another profile, or of an older one that was being replaced; remove it, or the profile if that is"
                " the wrong one"
            )
        return validated(Profile, document, way_out=PROFILE.again)


def _attach(document: dict[str, Any], read_constants: Callable[[], bytes] | None) -> None:
    """Put the arrays of the side file where a profile without one has them, or raise `ProfileError`."""
    if read_constants is None:
        raise ProfileError("its constants are in a side file, which is not at hand; give the file's path")
    data, stated = read_constants(), document["constants_sha256"]
    actual = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if actual != stated:
        raise ProfileError(
            f"constants_sha256 is {short(stated)}, but the side file has {actual}: it was changed, cut or exchanged, or"
            " an older profile was being replaced; fetch both files again, or write them by the same command again"
        )
    try:
        arrays = decode_constants(data)
    except ProfileError as error:
        raise ProfileError(f"its side file: {error}") from error
    layers = document.get("layers")
    entries = [entry for entry in layers if isinstance(entry, dict)] if isinstance(layers, list) else []
    keys = {entry.get("layer"): entry.get("k") for entry in entries if type(entry.get("layer")) is int}
    sides = [side for side in keys.values() if isinstance(side, dict)]
    if any(side.get(field) is not None for side in sides for field in ("mu", "lambda")):
        raise ProfileError("constants_sha256: mu and lambda are in the side file, but some stand in layers too")
    for name, array in arrays.items():
        layer, field = tensor_place(name)
        side = keys.get(layer)
        if not isinstance(side, dict):
            raise ProfileError(f"its side file: {name} is of a layer that the profile does not store")
        side[field] = array.model_dump(mode="json")


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
