"""A profile found by its reference: in files, run folders, the catalogue or the hub. Knows nothing of its use."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.evaluation_record import EVALUATION_SUFFIX
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.sharing.catalogue import catalogue_file
from kvtuner.exported_configs.sharing.reference import (
    CATALOGUE_PREFIX,
    CatalogueReference,
    HubReference,
    check_digest,
    parse_reference,
)


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """A profile with the place where it was found.

    Attributes:
        name: The name that finds the same profile again: a file's name, or a reference with its commit.
        where: The place: the user's folder, the cache of the hub's, or the catalogue.
        notes: Advice to the user on how it was found.
    """

    path: Path
    profile: Profile
    name: str
    where: Literal["folder", "cache", "catalogue"]
    notes: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether it is the user's file, beside which results may stand."""
        return self.where == "folder"


def find_profile(text: str) -> ResolvedProfile:
    """Find the one profile of a reference, as `sharing.reference` describes it.

    Raises:
        ProfileError: There is none, several, a wrong one, or not the one that was pinned.
        HubError: The hub does not give it.
    """
    profiles = find_profiles(text)
    if len(profiles) > 1:
        names = ", ".join(resolved.path.name for resolved in profiles)
        raise ProfileError(f"{text} holds several profiles; name one of {names}")
    return profiles[0]


def find_profiles(text: str) -> list[ResolvedProfile]:
    """Find all profiles of a reference, with the errors of `find_profile`: a run folder may hold several."""
    reference = parse_reference(text)
    if isinstance(reference, HubReference):
        from kvtuner.exported_configs.sharing.pull import pull  # with what a hub needs

        fetched = pull(reference)
        profiles = [ResolvedProfile(fetched.path, fetched.profile, str(fetched.reference), "cache", fetched.notes)]
    elif isinstance(reference, CatalogueReference):
        path = catalogue_file(reference.name)
        profiles = [ResolvedProfile(path, load_profile(path), f"{CATALOGUE_PREFIX}{reference.name}", "catalogue")]
    else:
        files = profile_files(reference.path)
        profiles = [ResolvedProfile(path, load_profile(path), path.name, "folder") for path in files]
    if reference.digest is not None and len(profiles) > 1:
        profiles = [resolved for resolved in profiles if resolved.profile.digest == reference.digest] or profiles
    for resolved in profiles:
        check_digest(resolved.profile.digest, reference.digest, text.partition("#")[0])
    return profiles


def profile_files(path: Path) -> list[Path]:
    """The file itself, or the profiles of a run folder; `ProfileError` where that has none."""
    if not os.path.isdir(path):  # which says no where Path.is_dir raises: a name that is too long
        return [path]
    files = [path / name for name in profile_names(sorted(file.name for file in path.glob("profile*")))]
    if not files:
        raise ProfileError(f"{path} holds no profile.json yet; run `kvtuner search --out {path}` to its end first")
    return files


def profile_names(names: Iterable[str]) -> list[str]:
    """The names of profiles among those of files."""
    return [name for name in names if name.endswith(".json") and EVALUATION_SUFFIX not in name]
