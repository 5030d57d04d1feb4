"""huggingface_hub, with bounds on time and size, and with errors of our own. Knows nothing of profiles.

It speaks the hub's protocol, redirects, retries and logs in; nothing of that is done here.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import HubError
from kvtuner.exported_configs.sharing.reference import HubReference, is_commit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from huggingface_hub import HfApi
    from tqdm import tqdm

    from kvtuner.exported_configs.sharing.upload import Upload

ANSWER_S: Final = 60.0
"""The longest wait for a piece of an answer: a silent hub would otherwise be waited for without end."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at a revision.

    Attributes:
        commit: The commit of the revision.
        sizes: The sizes of the files by path; None where the hub does not tell.
    """

    commit: str
    sizes: Mapping[str, int | None]


class HubClient:
    """A hub, by HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE as huggingface_hub reads them."""

    def __init__(self) -> None:
        """Import huggingface_hub.

        Raises:
            HubError: it is not installed.
        """
        try:
            from huggingface_hub import HfApi, constants
        except ImportError as error:
            raise HubError("profiles of the hub need huggingface_hub: pip install 'kvtuner[hub]'") from error
        self._api: HfApi = HfApi(library_name="kvtuner")
        self.is_offline: bool = constants.HF_HUB_OFFLINE

    def listing(self, repo: str, revision: str | None) -> Listing:
        """List a repository at a branch, a tag or a commit; at the main branch by default.

        Raises:
            HubError: it is not there, or the hub's answer is none.
        """
        what = f"{repo}@{revision or 'main'}"
        with _asking(what):
            info = self._api.model_info(repo, revision=revision, files_metadata=True, timeout=ANSWER_S)
            sizes = {file.rfilename: file.size for file in info.siblings or ()}
        if not isinstance(info.sha, str) or not is_commit(info.sha):
            raise HubError(f"{what}: the hub does not say which commit it is; check HF_ENDPOINT")
        if revision is not None and is_commit(revision) and info.sha != revision:
            raise HubError(f"{what}: the hub answers with another commit, {info.sha}; name what you mean in full")
        return Listing(info.sha, sizes)

    def exists(self, repo: str) -> bool:
        """Whether there is such a repository, as far as the token may see.

        Raises:
            HubError: the hub does not say.
        """
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        with _asking(repo):
            try:
                self._api.model_info(repo, timeout=ANSWER_S)
            except GatedRepoError:
                return True  # which is a kind of the next
            except RepositoryNotFoundError:
                return False
        return True

    def fetch(self, reference: HubReference, limit: int) -> bytes:
        """Fetch the content of a file at a commit, of at most `limit` bytes.

        Raises:
            HubError: it cannot be had, or is larger.
        """
        # The library's own cache believes a commit's file whatever became of it, so each fetch has one of its own.
        with tempfile.TemporaryDirectory(prefix="kvtuner-") as folder, _asking(str(reference)):
            path = self._api.hf_hub_download(
                reference.repo,
                reference.path,
                revision=reference.revision,
                cache_dir=folder,
                tqdm_class=_bounded(reference, limit),
            )
            return Path(path).read_bytes()

    def create(self, repo: str, *, private: bool) -> None:
        """Make a repository.

        Raises:
            HubError: the hub does not.
        """
        with _asking(repo, conflict="somebody made this repository meanwhile; run the same command again"):
            self._api.create_repo(repo, private=private)

    def commit(self, upload: Upload, *, parent: str, message: str) -> tuple[str, str]:
        """Make one commit on top of `parent`; give its id, and its address or that of the pull request.

        Raises:
            HubError: the hub does not take it, or the branch is not at `parent`.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        additions = [CommitOperationAdd(path, data) for path, data in upload.files.items()]
        with _asking(
            upload.repo, conflict="the branch moved while this was pushed; run the same command again to see it"
        ):
            made = self._api.create_commit(
                upload.repo,
                [*additions, *(CommitOperationDelete(path) for path in upload.removed)],
                commit_message=message,
                revision=upload.branch,
                create_pr=upload.create_pr,
                parent_commit=parent,
            )
        return made.oid, made.pr_url or made.commit_url


def _bounded(reference: HubReference, limit: int) -> type[tqdm[Any]]:
    """A progress bar that shows nothing and ends what grows too large: a server may send more than it announced."""
    from tqdm import tqdm

    class Bounded(tqdm):  # type: ignore[misc]  # tqdm has no types here
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._check(kwargs.get("total") or 0)
            self._seen = 0
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self._seen += int(n or 0)
            self._check(self._seen)

        @staticmethod
        def _check(size: int) -> None:
            if size > limit:
                raise HubError(f"{reference} has {size} bytes or more, above {limit}; this is none of ours")

    return Bounded


@contextmanager
def _asking(what: str, *, conflict: str = "") -> Iterator[None]:
    """Bound the time of answers, and turn failures into errors of our own."""
    from huggingface_hub import get_session

    from kvtuner.exported_configs.sharing.hub_errors import refusing

    session = get_session()
    before = session.timeout
    session.timeout = ANSWER_S
    try:
        with refusing(what, conflict):
            yield
    finally:
        session.timeout = before
