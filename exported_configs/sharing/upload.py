"""A push to the hub: its content, shown before it is made, and its one commit. Knows nothing of profiles and cards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvtuner.errors import HubError
from kvtuner.exported_configs.sharing.hub_client import HubClient

if TYPE_CHECKING:
    from collections.abc import Mapping


class RepoHead(NamedTuple):
    """The state of a branch before a push.

    Attributes:
        commit: The commit of the branch; None where there is no repository yet.
        files: The paths of its files.
    """

    commit: str | None
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Upload:
    """The content of a push.

    Attributes:
        repo: The repository, ``owner/name``.
        branch: The branch; None for the repository's main one.
        head: The state of the branch before the push.
        files: The content of the files by their paths in the repository.
        removed: The paths of files that go: they belong to a profile that is replaced.
        private: Whether a repository that is made is private.
        create_pr: Whether to open a pull request.
    """

    repo: str
    branch: str | None
    head: RepoHead
    files: Mapping[str, bytes]
    removed: tuple[str, ...] = ()
    private: bool = False
    create_pr: bool = False


class Pushed(NamedTuple):
    """The result of a push.

    Attributes:
        commit: The commit in full.
        url: The address of the commit, or of the pull request.
    """

    commit: str
    url: str


def look_at_branch(repo: str, branch: str | None) -> RepoHead:
    """Read the state of a branch that a push would add to.

    Raises:
        HubError: the hub cannot be reached, or has no such branch.
    """
    hub = HubClient()
    if hub.is_offline:
        raise HubError(f"{repo}: HF_HUB_OFFLINE is set, and a push needs the hub; unset it")
    if not hub.exists(repo):
        return RepoHead(None, ())
    listing = hub.listing(repo, branch)
    return RepoHead(listing.commit, tuple(listing.sizes))


def push(upload: Upload, message: str) -> Pushed:
    """Make one commit of all files, and check that it holds them.

    Raises:
        HubError: the hub does not take it, or the branch is not what it was when it was looked at.
    """
    hub = HubClient()
    parent = upload.head.commit
    if parent is None:
        hub.create(upload.repo, private=upload.private)
        parent = hub.listing(upload.repo, None).commit
    pushed = Pushed(*hub.commit(upload, parent=parent, message=message))
    sizes = hub.listing(upload.repo, pushed.commit).sizes
    for path, data in upload.files.items():
        if sizes.get(path) != len(data):
            raise HubError(
                f"{upload.repo}@{pushed.commit} lacks {path}: does the repository's .gitignore leave it out? Mend that,"
                " and push again"
            )
    return pushed
