"""The store of fetched profiles on this machine, by digest and origin. Knows nothing of hubs.

``<cache>/<digest>/<repository>@<commit>~<path>/`` holds the profile under its own file name, what came with it, and
``origin.json`` with the hash of every file. A profile with a changed file counts as absent and is fetched again.
``refs`` holds the commit that a branch or a tag was when it was pulled last.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from kvtuner.errors import ProfileError, RunFolderError
from kvtuner.exported_configs.profile.document import DocumentKind, naming, read_document
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.reference import is_commit
from kvtuner.run_folder import RunFolder, write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtuner.exported_configs.profile.profile import Profile

CACHE_VARIABLE: Final = "KVTUNER_CACHE"
ORIGIN: Final = "origin.json"
REFS: Final = "refs"
_LOCK: Final = "lock"
_MAX_BYTES: Final = 2**23 + 1
_ORIGIN: Final = DocumentKind("origin", "pull the profile again", 2**16, field_name=re.compile(r"[^\x00-\x1f/]{1,255}"))


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a stored profile.

    Attributes:
        repo: The repository, ``owner/name``.
        commit: The commit in full.
        path: The path of the file in the repository.
    """

    repo: str
    commit: str
    path: str

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit}:{self.path}"

    @property
    def key(self) -> str:
        """The name of its folder; hubs tell no capitals apart in names of repositories."""
        place = hashlib.sha256(self.path.encode()).hexdigest()[:12]
        return f"{self.repo.lower().replace('/', '--')}@{self.commit}~{place}"


@dataclass(frozen=True, slots=True)
class FetchedProfile:
    """A whole profile of the store.

    Attributes:
        path: The path of the profile's file.
        digest: The digest of the profile.
        origin: The origin of the profile.
    """

    path: Path
    digest: str
    origin: Origin

    def load(self) -> Profile:
        """Read and check the profile.

        Raises:
            ProfileError: the file changed since it was found.
        """
        profile = load_profile(self.path)
        if profile.digest != self.digest:
            raise ProfileError(f"{self.path} has digest {profile.digest}, which is not its folder's; pull it again")
        return profile


def cache_folder() -> Path:
    """The folder of the store: ``KVTUNER_CACHE``, or ``kvtuner`` in the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvtuner"


def store(digest: str, files: Mapping[str, bytes], origin: Origin) -> FetchedProfile:
    """Keep a profile and its companions; a whole profile that is already there stays.

    Args:
        digest: The digest of the checked profile.
        files: The content of the files by name; the profile has the last name of the origin's path.
        origin: The origin of the files.

    Raises:
        RunFolderError: the disk is full, or the folder cannot be written.
    """
    assert ORIGIN not in files
    cache = cache_folder()
    final = _folder(digest, origin)
    record = {**asdict(origin), "files": {name: _sha256(data) for name, data in files.items()}}
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with RunFolder(cache).lock(_LOCK), tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as work:
            fresh = Path(work, "files")
            fresh.mkdir()
            for name, data in {**files, ORIGIN: json.dumps(record, indent=1).encode()}.items():
                (fresh / name).write_bytes(data)
            _place(fresh, final, Path(work, "damaged"))
    except (OSError, RunFolderError) as error:
        raise _unwritable(error) from error
    return FetchedProfile(final / PurePosixPath(origin.path).name, digest, origin)


def _unwritable(error: OSError | RunFolderError) -> RunFolderError:
    cause = error.__cause__ if isinstance(error, RunFolderError) else error
    reason = cause.strerror if isinstance(cause, OSError) else error
    return RunFolderError(f"cannot write in {cache_folder()}: {reason}; set {CACHE_VARIABLE} to another folder")


def _place(fresh: Path, final: Path, damaged: Path) -> None:
    """Move a folder to where it belongs, under the lock."""
    if final.exists():
        if _read(final) is not None:
            return  # another process was faster: a commit's files never change
        final.rename(damaged)
    fresh.rename(final)
    shutil.rmtree(damaged, ignore_errors=True)  # its place is taken; the temporary folder goes anyway


def find_stored(repo: str, commit: str, path: str) -> FetchedProfile | None:
    """The profile that was fetched from a commit, if it is whole."""
    key = Origin(repo, commit, path).key
    folders = sorted(cache_folder().glob(f"*/{key}")) if is_commit(commit) else []
    return next((stored for folder in folders if (stored := _read(folder)) is not None), None)


def all_stored() -> Iterator[FetchedProfile]:
    """Every whole profile of the store, by digest."""
    for folder in sorted(cache_folder().glob("*/*@*~*")):
        stored = _read(folder)
        if stored is not None:
            yield stored


def remember(repo: str, revision: str, commit: str) -> str | None:
    """Note the commit of a branch or a tag; give the one that was noted before.

    Raises:
        RunFolderError: it cannot be written.
    """
    before = remembered(repo, revision)
    if before != commit:
        try:
            write_atomically(_ref(repo, revision), commit)
        except RunFolderError as error:
            raise _unwritable(error) from error
    return before


def remembered(repo: str, revision: str) -> str | None:
    """The commit of a branch or a tag when it was pulled last."""
    try:
        commit = _ref(repo, revision).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return commit if is_commit(commit) else None


def _ref(repo: str, revision: str) -> Path:
    # Hashed: a revision has slashes, and any length that a reference may have.
    name = hashlib.sha256(revision.encode()).hexdigest()
    return cache_folder() / REFS / repo.lower().replace("/", "--") / name


def _read(folder: Path) -> FetchedProfile | None:
    """The profile of a folder, if each of its files is unchanged and the profile is valid."""
    try:
        with naming(folder / ORIGIN, _ORIGIN):
            record = read_document(folder / ORIGIN, _ORIGIN)
        files = record.pop("files")
        origin = Origin(**record)
        if origin.key != folder.name or not all(_sha256(_bytes(folder / name)) == files[name] for name in files):
            return None
        path = folder / PurePosixPath(origin.path).name
        digest = load_profile(path).digest if path.name in files else ""
    except (ProfileError, OSError, KeyError, TypeError, AttributeError):
        return None  # never whole, or changed since: fetched again
    return FetchedProfile(path, digest, origin) if digest == f"sha256:{folder.parent.name}" else None


def _bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _folder(digest: str, origin: Origin) -> Path:
    return cache_folder() / digest.removeprefix("sha256:") / origin.key
