"""A push to the hub: what it will write, and the one commit that writes it. Knows nothing of profiles and cards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtuner.errors import HubError
from kvtuner.exported_configs.sharing.hub_client import HubClient

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class RepoHead:
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
    head: RepoHead
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


def look_at_branch(repo: str, branch: str | None) -> RepoHead:
    """What a push would add to.

    Raises:
        HubError: the hub cannot be reached, or has no such branch.
    """
    hub = HubClient()
    if hub.is_offline:
        raise HubError(f"{repo}: HF_HUB_OFFLINE is set, and a push needs the hub; unset it")
    if not hub.exists(repo):
        return RepoHead(None, ())
    found = hub.listing(repo, branch)
    return RepoHead(found.commit, tuple(found.sizes))


def push(upload: Upload, message: str) -> Pushed:
    """Make one commit of all files, and see that it holds them.

    Raises:
        HubError: the hub does not take it, or the branch is not what it was when it was looked at.
    """
    hub = HubClient()
    parent = upload.head.commit
    if parent is None:
        hub.create(upload.repo, private=upload.private)
        parent = hub.listing(upload.repo, None).commit
    commit, url = hub.commit(
        upload.repo,
        upload.branch,
        upload.files,
        upload.removed,
        parent=parent,
        message=message,
        create_pr=upload.create_pr,
    )
    sizes = hub.listing(upload.repo, commit).sizes
    for path, data in upload.files.items():
        if sizes.get(path) != len(data):
            raise HubError(
                f"{upload.repo}@{commit} lacks {path}: does the repository's .gitignore leave it out? Mend that, and"
                " push again"
            )
    return Pushed(commit, url)
