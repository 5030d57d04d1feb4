"""Profiles that were fetched, kept on this machine by their digest. Knows nothing of where they come from.

``<cache>/<hex digest>/`` holds the profile under its own file name, what came with it, and ``origin.json``. A folder
appears whole or not at all, and every profile is read and checked again whenever it is used.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner.errors import ProfileError, RunFolderError
from kvtuner.exported_configs.document import DocumentKind, naming, read_document
from kvtuner.exported_configs.load import load_profile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtuner.exported_configs.profile import Profile

CACHE_VARIABLE: Final = "KVTUNER_CACHE"
ORIGIN: Final = "origin.json"
_ORIGIN: Final = DocumentKind("origin", "pull the profile again", 2**16)
_FIELDS: Final = {"repo", "revision", "commit", "path"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a stored profile was fetched from.

    Attributes:
        repo: ``owner/name``.
        revision: as it was asked for.
        commit: what that was then.
        path: of the file in the repository.
    """

    repo: str
    revision: str
    commit: str
    path: str

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit}:{self.path}"


@dataclass(frozen=True, slots=True)
class Stored:
    """A profile of the store.

    Attributes:
        path: of the profile's file.
        digest: its folder's; the profile may have been damaged since.
        origin: where it came from.
    """

    path: Path
    digest: str
    origin: Origin

    def load(self) -> Profile:
        """Read and check it.

        Raises:
            ProfileError: damaged since it was stored.
        """
        profile = load_profile(self.path)
        if profile.digest != self.digest:
            raise ProfileError(f"{self.path} has digest {profile.digest}, which is not its folder's; pull it again")
        return profile


def cache_folder() -> Path:
    """Where profiles are kept: ``KVTUNER_CACHE``, or ``kvtuner`` in the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvtuner"


def store(name: str, digest: str, files: Mapping[str, bytes], origin: Origin) -> Stored:
    """Keep a profile and what came with it, in place of what had its digest.

    Args:
        name: of the profile among the files.
        digest: of the checked profile.
        files: by names without folders.
        origin: where they come from.

    Raises:
        RunFolderError: the disk is full, or the folder cannot be written.
    """
    final = _folder(digest)
    record = {"repo": origin.repo, "revision": origin.revision, "commit": origin.commit, "path": origin.path}
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=".new-") as work:
            fresh = Path(work, "files")
            fresh.mkdir()
            for file, data in {**files, ORIGIN: json.dumps(record, indent=1).encode()}.items():
                (fresh / file).write_bytes(data)
            _swap(fresh, final, Path(work, "old"))
    except OSError as error:
        raise RunFolderError(
            f"cannot keep the profile in {final.parent}: {error.strerror or error}; set {CACHE_VARIABLE} to another"
            " folder"
        ) from error
    return Stored(final / name, digest, origin)


def _swap(fresh: Path, final: Path, old: Path) -> None:
    """Put a folder in the place of another; who reads meanwhile sees the one, the other, or for a moment none."""
    if final.exists():
        if _same(fresh, final):
            return
        final.rename(old)
    fresh.rename(final)
    if old.exists():
        shutil.rmtree(old)


def _same(first: Path, second: Path) -> bool:
    def content(folder: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    return content(first) == content(second)


def stored(digest: str) -> Stored | None:
    """The profile with a digest, as far as its folder says; None if there is none."""
    folder = _folder(digest)
    try:
        with naming(folder / ORIGIN, _ORIGIN):
            record = read_document(folder / ORIGIN, _ORIGIN)
    except ProfileError:
        return None  # never stored, or not whole: it is fetched again
    if set(record) != _FIELDS or not all(isinstance(value, str) for value in record.values()):
        return None
    origin = Origin(**record)
    path = folder / Path(origin.path).name
    return Stored(path, digest, origin) if path.is_file() else None


def all_stored() -> Iterator[Stored]:
    """Every stored profile, by digest."""
    try:
        names = sorted(entry.name for entry in cache_folder().iterdir() if entry.is_dir())
    except OSError:
        return  # no cache yet
    for name in names:
        found = stored(f"sha256:{name}") if len(name) == 64 and name.isalnum() else None
        if found is not None:
            yield found


def _folder(digest: str) -> Path:
    return cache_folder() / digest.removeprefix("sha256:")
