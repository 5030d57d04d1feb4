"""The reference of a profile: a file, a run folder, the hub or the catalogue, and perhaps a digest. Opens nothing.

``owner/name[@revision][:path]`` is a profile of the hub, ``catalogue:name`` one that comes with kvtuner, all else a
file or a folder of this machine. ``#sha256:...`` after any of them pins the profile's digest.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

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
    """A file, or a folder that holds profiles."""

    path: Path
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class CatalogueReference:
    """A profile of the catalogue by its name."""

    name: str
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class HubReference:
    """A profile on the hub.

    Attributes:
        repo: The repository, ``owner/name``.
        revision: The branch, tag or commit.
        path: The path of the file in the repository.
        digest: The digest that the profile must have; None for any.
    """

    repo: str
    revision: str
    path: str = PROFILE_FILE
    digest: str | None = None

    @property
    def is_commit(self) -> bool:
        """Whether the revision can never mean something else."""
        return is_commit(self.revision)

    def at(self, commit: str) -> HubReference:
        """This reference at a commit."""
        return replace(self, revision=commit)

    @property
    def full_name(self) -> str:
        """The reference with its path, even where that is the usual one."""
        return f"{self.repo}@{self.revision}:{self.path}"

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" + ("" if self.path == PROFILE_FILE else f":{self.path}")


Reference = FileReference | CatalogueReference | HubReference
MAIN: Final = "main"


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit in full."""
    return _COMMIT.fullmatch(revision) is not None


def parse_reference(text: str) -> Reference:
    """Read a reference. A file that exists on this machine comes before a repository of the hub.

    Raises:
        ProfileError: the text has a digest that is none, or a path that leaves its repository.
    """
    if len(text) > MAX_LENGTH or "\0" in text:
        raise ProfileError(f"a profile is named in at most {MAX_LENGTH} characters, not {ascii(text)[:60]}")
    name, digest = _split_pin(text)
    if name.startswith(CATALOGUE_PREFIX):
        return CatalogueReference(name.removeprefix(CATALOGUE_PREFIX), digest)
    path = Path(os.path.expanduser(name))
    match = _HUB.fullmatch(name)
    if match is None or (name.endswith(".json") and match["path"] is None) or os.path.exists(path):
        return FileReference(path, digest)
    return HubReference(match["repo"], match["revision"] or MAIN, _checked(match["path"] or PROFILE_FILE, text), digest)


def parse_repo(text: str) -> str:
    """Read ``owner/name``.

    Raises:
        ProfileError: the text has another form.
    """
    match = _HUB.fullmatch(text)
    if match is None or match["revision"] or match["path"]:
        raise ProfileError(f"a repository of the hub is written owner/name, not {ascii(text)[:100]}")
    return match["repo"]


def check_digest(actual: str, pinned: str | None, name: str) -> None:
    """Compare a profile's digest with the one that its reference pins.

    Raises:
        ProfileError: they differ.
    """
    if pinned is not None and actual != pinned:
        raise ProfileError(
            f"{name} has digest {actual}, but {pinned} was asked for; look at what changed (kvtuner show), and pin it"
            " anew only if you trust it"
        )


def _split_pin(text: str) -> tuple[str, str | None]:
    match = _PIN.fullmatch(text)
    if match is None:
        return text, None
    if _DIGEST.fullmatch(match[2]) is None:
        raise ProfileError(
            f"a digest is pinned as #sha256: and 64 hexadecimal digits, not #{ascii(match[2])[1:80]};"
            " kvtuner validate prints it"
        )
    return match[1], match[2]


def _checked(path: str, text: str) -> str:
    parts = path.split("/")
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise ProfileError(f"{ascii(text)[:200]} must name a file inside the repository")
    return path
