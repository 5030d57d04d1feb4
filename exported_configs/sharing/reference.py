"""The reference of a profile: a file, a run folder, the hub or the catalogue, and perhaps a digest. Opens nothing.

``owner/name[@revision][:path]`` is a profile of the hub, ``catalogue:name`` one that comes with kvtuner, all else a
file or a folder of this machine. ``#sha256:...`` after any of them pins the profile's digest.
"""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from kvtuner.errors import ProfileError

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

    @property
    def is_commit(self) -> bool:
        """Whether the revision can never mean something else."""
        return is_commit(self.revision)

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
    """Whether a revision is a commit in full."""
    return _COMMIT.fullmatch(revision) is not None


def parse_reference(text: str) -> ProfileReference:
    """Read a reference, of a file that exists here before one of the hub; `ProfileError` for a bad digest or path."""
    if len(text) > MAX_LENGTH or "\0" in text:
        raise ProfileError(f"a profile is named in at most {MAX_LENGTH} characters, not {ascii(text)[:60]}")
    name, digest = text, None
    if pinned := _PIN.fullmatch(text):
        name, digest = pinned.groups()
        if _DIGEST.fullmatch(digest) is None:
            raise ProfileError(
                f"a digest is pinned as #sha256: and 64 hexadecimal digits, not #{ascii(digest)[1:80]};"
                " kvtuner validate prints it"
            )
    if name.startswith(CATALOGUE_PREFIX):
        return CatalogueReference(name.removeprefix(CATALOGUE_PREFIX), digest)
    match = _HUB.fullmatch(name)
    file = Path(os.path.expanduser(name))
    if match is None or (name.endswith(".json") and match["path"] is None) or os.path.exists(file):
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
