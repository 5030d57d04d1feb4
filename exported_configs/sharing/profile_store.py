"""The store of fetched profiles on this machine, by digest and origin. Knows nothing of hubs.

``<cache>/<digest>/<repository>@<commit>~<path>/`` holds the profile under its own file name, what came with it, and
``origin.json`` with the hash of every file. A profile with a changed file counts as absent and is fetched again.
``refs`` holds the commit that a branch or a tag was when it was pulled last.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from kvtuner.errors import ProfileError, RunFolderError
from kvtuner.exported_configs.profile.constants_file import MAX_CONSTANTS_BYTES, constants_name
from kvtuner.exported_configs.profile.document import DocumentKind, first_bytes, read_document
from kvtuner.exported_configs.profile.field_types import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.sharing.reference import HubReference, check_digest, is_commit
from kvtuner.run_folder import RunFolder, write_atomically

CACHE_VARIABLE: Final = "KVTUNER_CACHE"
ORIGIN: Final = "origin.json"
_MAX_BYTES: Final = max(MAX_PROFILE_BYTES, MAX_CONSTANTS_BYTES) + 1
"""The bytes that are read of a file: one more than any of ours has, so a larger file or a device is not whole."""
_ORIGIN: Final = DocumentKind("origin", "pull the profile again", 2**16, field_name=re.compile(r"[^\x00-\x1f/]{1,255}"))


@dataclass(frozen=True, slots=True)
class FetchedProfile:
    """A profile of the hub on this machine, its reference at a commit, and notes on moves and on files left out."""

    path: Path
    profile: Profile
    reference: HubReference
    notes: tuple[str, ...] = ()


def cache_folder() -> Path:
    """The folder of the store: ``KVTUNER_CACHE``, or ``kvtuner`` in the user's cache folder."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvtuner")


def store_profile(reference: HubReference, files: Mapping[str, bytes], profile: Profile) -> FetchedProfile:
    """Keep a commit's files by their names, unless they are there and whole; `RunFolderError` where that fails."""
    assert ORIGIN not in files
    cache, folder = cache_folder(), _folder(reference, profile)
    origin = {"repo": reference.repo, "commit": reference.revision, "path": reference.path, "files": _hashes(files)}
    with _writing():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with RunFolder(cache).lock("lock"), tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as work:
            fresh = Path(work, "files")
            fresh.mkdir()
            for name, data in {**files, ORIGIN: json.dumps(origin, indent=1).encode()}.items():
                (fresh / name).write_bytes(data)
            if _read(folder) is None:  # another process may have been faster
                if folder.exists():
                    folder.rename(Path(work, "damaged"))
                fresh.rename(folder)
    return FetchedProfile(folder / PurePosixPath(reference.path).name, profile, reference)


def find_stored(reference: HubReference) -> FetchedProfile | None:
    """The profile that was fetched from a commit, if it is whole; `ProfileError` where another digest is pinned."""
    folders = sorted(cache_folder().glob(f"*/{_key(reference)}")) if is_commit(reference.revision) else []
    fetched = next(filter(None, map(_read, folders)), None)
    if fetched is not None:
        check_digest(fetched.profile.digest, reference.digest, str(reference))
    return fetched


def all_stored() -> Iterator[FetchedProfile]:
    """Every whole profile of the store, by digest."""
    return filter(None, map(_read, sorted(cache_folder().glob("*/*@*~*"))))


def remember(reference: HubReference, commit: str) -> str | None:
    """Note the commit of a branch or a tag; returns the one that was noted before."""
    before = remembered(reference)
    if before != commit:
        with _writing():
            write_atomically(_ref(reference), commit)
    return before


def remembered(reference: HubReference) -> str | None:
    """The commit of a branch or a tag when it was pulled last."""
    try:
        commit = _ref(reference).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return commit if is_commit(commit) else None


def _key(reference: HubReference) -> str:
    # Hubs tell no capitals apart in names of repositories.
    place = hashlib.sha256(reference.path.encode()).hexdigest()[:12]
    return f"{reference.repo.lower().replace('/', '--')}@{reference.revision}~{place}"


def _folder(reference: HubReference, profile: Profile) -> Path:
    return cache_folder() / profile.digest.removeprefix("sha256:") / _key(reference)


def _ref(reference: HubReference) -> Path:
    # Hashed: a revision has slashes, and any length that a reference may have.
    name = hashlib.sha256(reference.revision.encode()).hexdigest()
    return cache_folder() / "refs" / reference.repo.lower().replace("/", "--") / name


def _read(folder: Path) -> FetchedProfile | None:
    """The profile of a folder, if each of its files is unchanged and the profile is valid."""
    try:
        record = read_document(folder / ORIGIN, _ORIGIN)
        reference = HubReference(record["repo"], record["commit"], record["path"])
        files = {name: first_bytes(folder / name, _MAX_BYTES) for name in record["files"]}
        path = folder / PurePosixPath(reference.path).name
        profile = load_profile(files[path.name], read_constants=lambda: files[constants_name(path.name)])
        is_whole = _hashes(files) == record["files"] and folder == _folder(reference, profile)
    except (ProfileError, OSError, KeyError, TypeError, AttributeError):
        return None  # never whole, or changed since: fetched again
    return FetchedProfile(path, profile, reference) if is_whole else None


def _hashes(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except (OSError, RunFolderError) as error:
        reason = getattr(error.__cause__ or error, "strerror", error)
        raise RunFolderError(
            f"cannot write in {cache_folder()}: {reason}; set {CACHE_VARIABLE} to another folder"
        ) from error
