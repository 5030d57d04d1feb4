"""The reference of a profile, and the profile that it names: in a file, a run folder, the catalogue or the hub.

``owner/name[@revision][:path]`` is a profile of the hub, ``catalogue:name`` one that comes with kvtuner, all else a
file or a folder of this machine. ``#sha256:...`` after any of them pins the profile's digest.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, Self

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.evaluation_record import EVALUATION_SUFFIX
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.sharing.catalogue import catalogue_file
from kvtuner.run_folder import RUNS

PROFILE_FILE: Final = "profile.json"
CATALOGUE_PREFIX: Final = "catalogue:"
MAX_LENGTH: Final = 4096
_PIN: Final = re.compile(r"(.*)#(sha256:.*)", re.DOTALL | re.IGNORECASE)
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_HUB: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[^:@\s]{1,200}))?(?::(?P<path>.{1,500}))?",
    re.ASCII,
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class FileReference:
    """A file, or a folder that holds profiles, and the digest that a profile must have; None for any."""

    path: Path
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class CatalogueReference:
    """A profile of the catalogue by its name, and its digest."""

    name: str
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class HubReference:
    """A profile on the hub: ``owner/name``, a branch, tag or commit, the path of the file there, and the digest."""

    repo: str
    revision: str
    path: str = PROFILE_FILE
    digest: str | None = None

    def at(self, commit: str) -> Self:
        """This reference at a commit."""
        return replace(self, revision=commit)

    @property
    def full_name(self) -> str:
        """The reference with its path, even where that is the usual one."""
        return f"{self.repo}@{self.revision}:{self.path}"

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.path == PROFILE_FILE else self.full_name


ProfileReference = FileReference | CatalogueReference | HubReference


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit in full, and so can never mean something else."""
    return _COMMIT.fullmatch(revision) is not None


def parse_reference(text: str) -> ProfileReference:
    """Read a reference; `ProfileError` for a bad digest or path.

    A name is of a file rather than of the hub if there is such a file, or such a folder and no revision.
    """
    if len(text) > MAX_LENGTH or "\0" in text:
        raise ProfileError(
            f"a profile is named in at most {MAX_LENGTH} characters without NUL, not {ascii(text)[:60]}; name a file,"
            " a run folder, owner/name or catalogue:name"
        )
    name, digest = text, None
    if pinned := _PIN.fullmatch(text):
        name, digest = pinned.groups()
        if _DIGEST.fullmatch(digest) is None:
            raise ProfileError(
                f"a digest is pinned as #sha256: and 64 hexadecimal digits, not #{ascii(digest)[1:-1][:80]};"
                " kvtuner validate prints it"
            )
    if name.startswith(CATALOGUE_PREFIX):
        return CatalogueReference(name.removeprefix(CATALOGUE_PREFIX), digest)
    match = _HUB.fullmatch(name)
    file = Path(os.path.expanduser(name))
    if match is None or (name.endswith(".json") and match["path"] is None) or os.path.exists(file):
        return FileReference(file, digest)
    # What would lie in a folder of this machine is a mistyped path, not a repository of an owner called runs.
    is_plain = match["revision"] is None and match["path"] is None
    if is_plain and (file.parent.is_dir() or file.parent == Path(RUNS)):
        return FileReference(file, digest)
    path = match["path"] or PROFILE_FILE
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ProfileError(f"{ascii(text)[:200]} must name a file inside the repository")
    return HubReference(match["repo"], match["revision"] or "main", path, digest)


def parse_repo(text: str) -> str:
    """Read ``owner/name``, or raise `ProfileError`."""
    match = _HUB.fullmatch(text)
    if match is None or match["revision"] or match["path"]:
        raise ProfileError(f"a repository of the hub is written owner/name, not {ascii(text)[:100]}")
    return match["repo"]


def check_digest(actual: str, pinned: str | None, name: str) -> None:
    """Compare a profile's digest with the one that its reference pins, or raise `ProfileError`."""
    if pinned is not None and actual != pinned:
        raise ProfileError(
            f"{name} has digest {actual}, but {pinned} was asked for; look at what changed (kvtuner show), and pin it"
            " anew only if you trust it"
        )


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """A profile with the place where it was found: the user's folder, the cache of the hub's, or the catalogue.

    The name finds the same profile again: a file's name, or a reference with its commit. Notes advise the user.
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

    @property
    def reference(self) -> str:
        """What finds it again: the name, or the path of the user's file as it was given."""
        return str(self.path) if self.is_own else self.name


def find_profile(text: str) -> ResolvedProfile:
    """Find the one profile of a reference.

    No profile, several, a wrong one, or not the one that was pinned is a `ProfileError`; a hub that does not give it is
    a `HubError`.
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
        may_be_of_hub = _HUB.fullmatch(str(reference.path)) and reference.path.suffix != ".json"
        if may_be_of_hub and not os.path.exists(reference.path):
            folder = reference.path.parent
            reason = "is a folder here" if folder.is_dir() else "is where run folders are"
            raise ProfileError(
                f"there is no {reference.path}, and {folder} {reason}; a profile of the hub is then written"
                f" {reference.path}@main"
            )
        files = profile_files(reference.path)
        profiles = [ResolvedProfile(path, load_profile(path), path.name, "folder") for path in files]
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
        raise ProfileError(f"{path} holds no profile.json yet; run kvtuner search --out {path} to its end first")
    return files


def profile_names(names: Iterable[str]) -> list[str]:
    """The names of profiles among those of files."""
    return [name for name in names if name.endswith(".json") and EVALUATION_SUFFIX not in name]
