"""A push to the hub: its content, shown before it is made, and its one commit. Knows nothing of profiles and cards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from kvtuner.errors import HubError
from kvtuner.exported_configs.sharing.hub_client import hub_api, hub_errors, list_files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtuner.exported_configs.sharing.hub_client import Listing


@dataclass(frozen=True, slots=True)
class Upload:
    """The content of a push.

    Attributes:
        repo: The repository, ``owner/name``.
        branch: The branch; None for the repository's main one.
        head: The state of the branch before the push; None where there is no repository yet.
        files: The content of the files by their paths in the repository.
        removed: The paths of files that go: they belong to a profile that is replaced.
        private: Whether a repository that is made is private.
        create_pr: Whether to open a pull request.
    """

    repo: str
    branch: str | None
    head: Listing | None
    files: Mapping[str, bytes]
    removed: tuple[str, ...] = ()
    private: bool = False
    create_pr: bool = False


class Pushed(NamedTuple):
    """The commit of a push, in full, and its address or that of the pull request."""

    commit: str
    url: str


def look_at_branch(repo: str, branch: str | None) -> Listing | None:
    """Read the state of a branch that a push would add to; None where there is no repository yet.

    Raises:
        HubError: the hub cannot be reached, or has no such branch.
    """
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"{repo}: HF_HUB_OFFLINE is set, and a push needs the hub; unset it")
    try:
        return list_files(repo, branch)
    except HubError as error:
        cause = error.__cause__
        if isinstance(cause, RepositoryNotFoundError) and not isinstance(cause, GatedRepoError):
            return None
        raise


def push(upload: Upload, message: str) -> Pushed:
    """Make one commit of all files, and check that it holds them.

    Raises:
        HubError: the hub does not take it, or the branch is not what it was when it was looked at.
    """
    repo, head = upload.repo, upload.head
    if head is None:
        with hub_errors(repo, conflict="somebody made this repository meanwhile; run the same command again"):
            hub_api().create_repo(repo, private=upload.private)
        head = list_files(repo, None)
    additions = [CommitOperationAdd(path, data) for path, data in upload.files.items()]
    removals = [CommitOperationDelete(path) for path in upload.removed]
    with hub_errors(repo, conflict="the branch moved while this was pushed; run the same command again to see it"):
        commit = hub_api().create_commit(
            repo,
            [*additions, *removals],
            commit_message=message,
            revision=upload.branch,
            create_pr=upload.create_pr,
            parent_commit=head.commit,
        )
    sizes = list_files(repo, commit.oid).sizes
    for path, data in upload.files.items():
        if sizes.get(path) != len(data):
            raise HubError(
                f"{repo}@{commit.oid} lacks {path}: does the repository's .gitignore leave it out? Mend that, and push"
                " again"
            )
    return Pushed(commit.oid, commit.pr_url or commit.commit_url)
