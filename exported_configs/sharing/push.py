"""The upload of a profile's files to the hub in one commit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from kvtuner.errors import HubError
from kvtuner.exported_configs.profile.constants_file import constants_name
from kvtuner.exported_configs.profile.evaluation_record import EVALUATION_SUFFIX
from kvtuner.exported_configs.sharing.hub_client import Listing, hub_api, hub_errors, is_unanswered, list_files
from kvtuner.exported_configs.sharing.reference import profile_names
from kvtuner.exported_configs.signing.signature_bundle import SIGNATURE_SUFFIX


@dataclass(frozen=True, slots=True)
class Upload:
    """The content of a push to a branch, None for the main one; the head is None where there is no repository yet.

    Files that are removed belong to a profile that is replaced. A repository that is made is `private` or public; one
    that is there stays as it is, and is private already where that is asked for. `unknown_head` says why nobody knows
    what is there, which a preview may leave open and a push may not; it is None where the hub said it.
    """

    repo: str
    branch: str | None
    head: Listing | None
    files: Mapping[str, bytes]
    removed: tuple[str, ...] = ()
    private: bool = False
    create_pr: bool = False
    unknown_head: str | None = None

    @property
    def is_private(self) -> bool | None:
        """Whether only some will see what is pushed; None where nobody knows."""
        if self.unknown_head is not None:
            return self.private or None
        return self.private if self.head is None else self.head.is_private


class Pushed(NamedTuple):
    """The commit of a push, in full, and its address or that of the pull request."""

    commit: str
    url: str


def plan_upload(
    repo: str,
    files: Mapping[str, bytes],
    *,
    branch: str | None = None,
    private: bool = False,
    create_pr: bool = False,
    is_preview: bool = False,
) -> Upload:
    """Look at a branch, and plan the commit of files on top of it; see `Upload`. `HubError` where that cannot be.

    A preview needs no hub and no token: it does not know then what it would replace.
    """
    try:
        if constants.HF_HUB_OFFLINE:
            raise HubError(f"{repo}: HF_HUB_OFFLINE is set, and a push needs the hub; unset it")
        head = list_files(repo, branch)
    except HubError as error:
        if is_preview and is_unanswered(error):
            return Upload(repo, branch, None, files, (), private, create_pr, unknown_head=str(error))
        cause = error.__cause__
        if not isinstance(cause, RepositoryNotFoundError) or isinstance(cause, GatedRepoError):
            raise
        if branch:
            raise HubError(
                f"{repo} is not there, so it has no branch {branch}; leave --revision out to make it"
            ) from None
        return Upload(repo, branch, None, files, private=private, create_pr=create_pr)
    if private and not head.is_private:
        raise _not_private(repo, head)
    stems = [name.removesuffix(".json") for name in profile_names(files)]
    removed = tuple(
        name
        for name in head.sizes
        if name not in files
        and any(
            name in (f"{stem}.json{SIGNATURE_SUFFIX}", constants_name(stem))
            or name.startswith(stem + EVALUATION_SUFFIX)
            for stem in stems
        )
    )
    return Upload(repo, branch, head, files, removed, private, create_pr)


def _not_private(repo: str, head: Listing) -> HubError:
    found = "is public" if head.is_private is False else "may be public: the hub does not tell"
    return HubError(
        f"{repo} {found}, and --private is for a new repository or one that is private; no file was sent: leave it out"
        " to publish, or make the repository private on its settings page first"
    )


def push(upload: Upload, message: str) -> Pushed:
    """Make one commit of all files; `HubError` where it does not hold them, or the branch moved since it was read."""
    repo, head = upload.repo, upload.head
    assert upload.unknown_head is None, "a preview is not pushed"
    if head is None:
        with hub_errors(repo, conflict="somebody made this repository meanwhile; run the same command again"):
            hub_api().create_repo(repo, private=upload.private)
        head = list_files(repo, None)
        if upload.private and head.is_private is False:  # where the hub does not tell, it took the flag
            raise _not_private(repo, head)
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
