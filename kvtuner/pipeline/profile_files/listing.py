"""Profiles at hand: those of the catalogue, of the local cache, and below a folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.identity.mismatch import Policy
from kvtuner.exported_configs.profile.evaluation_record import SUFFIX
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.catalogue import catalogue_file, load_index
from kvtuner.exported_configs.sharing.profile_store import all_stored
from kvtuner.pipeline.inputs import model_mismatches
from kvtuner.pipeline.progress import say
from kvtuner.report.formatting import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtuner.exported_configs.profile.profile import Profile

_SKIPPED: Final = {".git", "node_modules", "__pycache__"}


@dataclass(frozen=True, slots=True)
class ListedProfile:
    """A profile at hand.

    Attributes:
        name: The name by which other commands find it.
        where: The kind of place: ``catalogue``, ``cache`` or ``folder``.
        profile: The profile.
    """

    name: str
    where: str
    profile: Profile


def list_profiles(folder: Path | None, *, model: str | None = None) -> list[ListedProfile]:
    """Profiles at hand; a file that is no valid profile is named on stderr.

    Args:
        folder: The folder to look through as well.
        model: The model that they must fit; any where it is None.

    Raises:
        ProfileError: There is no such folder.
    """
    profiles = [*_catalogue(), *_cache(), *(_below(folder) if folder else ())]
    return profiles if model is None else [listed for listed in profiles if _fits(listed.profile, model)]


def _catalogue() -> Iterator[ListedProfile]:
    for entry in load_index().profiles:
        yield ListedProfile(f"catalogue:{entry.name}", "catalogue", load_profile(catalogue_file(entry.name)))


def _cache() -> Iterator[ListedProfile]:
    for fetched in all_stored():
        yield ListedProfile(fetched.reference.full_name, "cache", fetched.profile)


def _below(top: Path) -> Iterator[ListedProfile]:
    """Profiles below a folder, by their names; other JSON files are none."""
    if not top.is_dir():
        raise ProfileError(f"{top} is no folder; name one, or leave it out")
    for folder, names, files in os.walk(top):
        names[:] = sorted(set(names) - _SKIPPED)
        for name in sorted(files):
            if not (name.startswith("profile") and name.endswith(".json")) or SUFFIX in name:
                continue
            path = Path(folder, name)
            try:
                yield ListedProfile(str(path), "folder", load_profile(path))
            except ProfileError as error:
                say(f"not shown: {printable(str(error))}")


def _fits(profile: Profile, model: str) -> bool:
    """Whether `kvtuner validate --model` finds nothing against a profile."""
    try:
        mismatches = model_mismatches(profile, model, Policy())
    except ProfileError:  # another geometry
        return False
    return all(mismatch.severity != "error" for mismatch in mismatches)
