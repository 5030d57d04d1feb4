"""Profiles on the hub: fetched by commit and kept by digest, pushed in one commit. Knows nothing of cards or flags."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import HubError, ProfileError
from kvtuner.exported_configs.evaluation import EVALUATION, SUFFIX
from kvtuner.exported_configs.fields import MAX_PROFILE_BYTES
from kvtuner.exported_configs.load import load_profile
from kvtuner.exported_configs.reference import PROFILE_FILE, HubReference, check_digest
from kvtuner.exported_configs.store import Origin, Stored, all_stored, store, stored

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from huggingface_hub import HfApi

SIGNATURE_SUFFIX: Final = ".sig"
MAX_SIGNATURE_BYTES: Final = 2**20
MAX_COMPANIONS: Final = 32


@dataclass(frozen=True, slots=True)
class Pulled:
    """A profile of the hub, on this machine.

    Attributes:
        stored: where it is.
        notes: what a person should know: a revision that may move, or that moved.
    """

    stored: Stored
    notes: tuple[str, ...] = ()


def pull(reference: HubReference) -> Pulled:
    """Fetch a profile with its evaluations and signature, check it, and keep it by its digest.

    What the store has already is not fetched again: a pinned digest, or a commit in full. With ``HF_HUB_OFFLINE``
    nothing is fetched at all.

    Raises:
        HubError: it cannot be had.
        ProfileError: what was fetched is no profile, or not the one that was pinned.
        RunFolderError: it cannot be kept.
    """
    kept = _kept(reference)
    if kept is not None:
        return Pulled(kept)
    hub = _Hub()
    if hub.is_offline:
        return _pull_offline(reference)
    commit, names = hub.look(reference)
    at = reference.at(commit)
    data = hub.fetch(at, MAX_PROFILE_BYTES, names)
    profile = _checked(at, data)
    files = {PurePosixPath(at.path).name: data}
    for name, limit in _companions(at.path, names):
        files[PurePosixPath(name).name] = hub.fetch(HubReference(at.repo, commit, name), limit, names)
    notes = _notes(reference, commit)
    origin = Origin(at.repo, reference.revision, commit, at.path)
    return Pulled(store(PurePosixPath(at.path).name, profile, files, origin), notes)


def _checked(reference: HubReference, data: bytes) -> str:
    """The digest of fetched bytes."""
    try:
        digest = load_profile(data).digest
    except ProfileError as error:
        raise ProfileError(f"{reference} holds no valid profile: {error}") from error
    check_digest(digest, reference.digest, str(reference))
    return digest


def _kept(reference: HubReference) -> Stored | None:
    """What needs no network: a digest or a commit that was fetched before and is whole."""
    candidates: list[Stored | None] = []
    if reference.digest is not None:
        candidates = [stored(reference.digest)]
    elif reference.is_commit:
        candidates = [each for each in all_stored() if _is_of(each, reference) and _commit(each) == reference.revision]
    for each in candidates:
        if each is not None and _is_whole(each):
            return each
    return None


def _is_whole(each: Stored) -> bool:
    try:
        each.load()
    except ProfileError:
        return False  # damaged since: fetched again
    return True


def _is_of(each: Stored, reference: HubReference) -> bool:
    return each.origin.repo.lower() == reference.repo.lower() and each.origin.path == reference.path


def _commit(each: Stored) -> str:
    return each.origin.commit


def _pull_offline(reference: HubReference) -> Pulled:
    matching = [each for each in all_stored() if _is_of(each, reference)]
    for each in matching:
        if reference.revision in (each.origin.revision, each.origin.commit):
            check_digest(each.load().digest, reference.digest, str(reference))
            note = f"HF_HUB_OFFLINE: {reference} as it was when it was pulled, {each.origin.commit}"
            return Pulled(each, () if reference.is_commit else (note,))
    known = ", ".join(sorted({each.origin.commit for each in matching}))
    raise HubError(
        f"{reference}: HF_HUB_OFFLINE is set and it was never pulled"
        + (f"; here is {reference.repo} at {known}" if known else "; pull it once without, or name a file")
    )


def _notes(reference: HubReference, commit: str) -> tuple[str, ...]:
    if reference.is_commit:
        return ()
    notes = [f"{reference} may change; it is {reference.at(commit)} now: name that to keep it"]
    earlier = {_commit(each) for each in all_stored() if _is_of(each, reference)} - {commit}
    before = [each for each in all_stored() if _is_of(each, reference) and each.origin.revision == reference.revision]
    if earlier and before and commit not in map(_commit, before):
        notes.append(f"{reference} moved: it was {_commit(before[0])} when it was pulled last")
    return tuple(notes)


def _companions(path: str, names: Mapping[str, int | None]) -> list[tuple[str, int]]:
    """Evaluations and the signature beside a profile, and how large each may be."""
    stem = path.removesuffix(".json")
    found = [
        (name, EVALUATION.max_bytes)
        for name in sorted(names)
        if name.startswith(stem + SUFFIX) and name.endswith(".json") and "/" not in name.removeprefix(stem)
    ]
    if len(found) > MAX_COMPANIONS:
        raise HubError(f"{path} has {len(found)} evaluations beside it, above {MAX_COMPANIONS}; ask its owner for less")
    return found + [(name, MAX_SIGNATURE_BYTES) for name in names if name == path + SIGNATURE_SUFFIX]


@dataclass(frozen=True, slots=True)
class Head:
    """What a branch holds before a push.

    Attributes:
        commit: it is at; None where there is no repository yet.
        files: in it.
    """

    commit: str | None
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Upload:
    """A push as it will be: shown before it is made.

    Attributes:
        repo: ``owner/name``.
        branch: None for the repository's main one.
        head: what is there.
        files: content by path in the repository.
        removed: paths that go: what stood beside a profile that is replaced.
        private: of a repository that is made.
        create_pr: open a pull request.
    """

    repo: str
    branch: str | None
    head: Head
    files: Mapping[str, bytes]
    removed: tuple[str, ...] = ()
    private: bool = False
    create_pr: bool = False


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push made.

    Attributes:
        commit: in full.
        url: of the commit, or of the pull request.
    """

    commit: str
    url: str


def look_at_branch(repo: str, branch: str | None) -> Head:
    """What a push would add to.

    Raises:
        HubError: the hub cannot be reached, or has no such branch.
    """
    hub = _Hub()
    if hub.is_offline:
        raise HubError(f"{repo}: HF_HUB_OFFLINE is set, and a push needs the hub; unset it")
    return hub.head(repo, branch)


def push(upload: Upload, message: str) -> Pushed:
    """Make one commit of all files, and see that it holds them.

    Raises:
        HubError: the hub does not take it, or the branch is not what it was when it was looked at.
    """
    return _Hub().push(upload, message)


class _Hub:
    """huggingface_hub, behind errors of our own."""

    def __init__(self) -> None:
        try:
            from huggingface_hub import HfApi, constants
        except ImportError as error:
            raise HubError("profiles of the hub need huggingface_hub: pip install 'kvtuner[hub]'") from error
        self._api: HfApi = HfApi(library_name="kvtuner")
        self.is_offline: bool = constants.HF_HUB_OFFLINE
        # Without one, a hub that says nothing would be waited for without end.
        self._timeout: float = constants.HF_HUB_ETAG_TIMEOUT

    def look(self, reference: HubReference) -> tuple[str, dict[str, int | None]]:
        """The commit that a revision is, and the sizes of its files."""
        from kvtuner.exported_configs.hub_errors import refusing

        with refusing(str(reference)):
            info = self._api.model_info(
                reference.repo, revision=reference.revision, files_metadata=True, timeout=self._timeout
            )
        if info.sha is None:
            raise HubError(f"{reference}: the hub does not say which commit it is; check HF_ENDPOINT")
        return info.sha, {file.rfilename: file.size for file in info.siblings or ()}

    def fetch(self, reference: HubReference, limit: int, names: Mapping[str, int | None]) -> bytes:
        """The content of a file at a commit, if it is no larger than it may be."""
        from kvtuner.exported_configs.hub_errors import refusing

        if reference.path not in names:
            profiles = [name for name in sorted(names) if name.endswith(".json") and SUFFIX not in name]
            known = f"; it has {', '.join(profiles[:8])}" if profiles else ""
            raise HubError(f"{reference}: the repository has no file {reference.path}{known}")
        with refusing(str(reference)), _without_bars():
            asked: dict[str, Any] = {"repo_id": reference.repo, "filename": reference.path}
            planned = self._api.hf_hub_download(**asked, revision=reference.revision, dry_run=True)
            if planned.file_size is None or planned.file_size > limit:
                raise HubError(f"{reference} has {planned.file_size} bytes, above {limit}; this is no {PROFILE_FILE}")
            path = Path(self._api.hf_hub_download(**asked, revision=reference.revision))
            with path.open("rb") as handle:
                return handle.read(limit + 1)

    def head(self, repo: str, branch: str | None) -> Head:
        """What a branch holds; a repository that is not there, or not for us to see, will be made."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        from kvtuner.exported_configs.hub_errors import refusing

        with refusing(repo if branch is None else f"{repo}@{branch}"):
            try:
                info = self._api.model_info(repo, revision=branch, timeout=self._timeout)
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return Head(None, ())
        return Head(info.sha, tuple(file.rfilename for file in info.siblings or ()))

    def push(self, upload: Upload, message: str) -> Pushed:
        """Commit, on top of what was looked at, and look again."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        from kvtuner.exported_configs.hub_errors import refusing

        head = upload.head
        with refusing(upload.repo), _without_bars():
            if head.commit is None:
                self._api.create_repo(upload.repo, private=upload.private)
                head = Head(self._api.model_info(upload.repo).sha, ())
            made = self._api.create_commit(
                upload.repo,
                [
                    *(CommitOperationAdd(path, data) for path, data in upload.files.items()),
                    *(CommitOperationDelete(path) for path in upload.removed),
                ],
                commit_message=message,
                revision=upload.branch,
                create_pr=upload.create_pr,
                parent_commit=head.commit,
            )
            found = self._api.get_paths_info(upload.repo, list(upload.files), revision=made.oid)
        sizes = {entry.path: getattr(entry, "size", None) for entry in found}
        for path, data in upload.files.items():
            if sizes.get(path) != len(data):
                raise HubError(
                    f"{upload.repo}@{made.oid} lacks {path}: does the repository's .gitignore leave it out? Mend that,"
                    " and push again"
                )
        return Pushed(made.oid, made.pr_url or made.commit_url)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Files of some kilobytes need no progress bars."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()
