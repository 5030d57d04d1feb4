"""huggingface_hub, with bounds on time and size, and its failures in one line each. Knows profiles by name alone.

It speaks the hub's protocol, redirects, retries and logs in; nothing of that is done here. No message names a token or
a password.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx
from huggingface_hub import HfApi, constants, get_session, get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from kvtuner.errors import HubError, OversizedFileError
from kvtuner.exported_configs.profile.document import first_bytes, one_line
from kvtuner.exported_configs.sharing.reference import HubReference, is_commit

ANSWER_S: Final = 60.0
"""The longest wait for a piece of an answer: a silent hub would otherwise be waited for without end."""
LOG_IN: Final = "log in (hf auth login) or set HF_TOKEN"
ABSENT: Final = f"there is no such repository, or it is private; check the name, or {LOG_IN}"
# An answer that is not JSON, or JSON but not the hub's: the library takes it apart and trips.
_TRIPS: Final = (KeyError, TypeError, AttributeError, IndexError, RecursionError)
_REASONS: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...]] = (
    (GatedRepoError, f"is gated; accept its terms on its page, then {LOG_IN}"),
    (RepositoryNotFoundError, ABSENT),
    (
        RevisionNotFoundError,
        "the repository has no such revision (removed, or renamed); see its history for the one you mean",
    ),
    (EntryNotFoundError, "the repository has no such file there; name another as owner/name@revision:path"),
    (DisabledRepoError, "the hub has disabled this repository"),
    (HfHubHTTPError, ""),
    (HFValidationError, "the hub does not allow this name ({error})"),
    (
        (FileMetadataError, json.JSONDecodeError, *_TRIPS),
        "{endpoint} does not answer as a hub does; check HF_ENDPOINT and proxies",
    ),
    # Its text may hold half of a password.
    (httpx.InvalidURL, "HF_ENDPOINT is no address; set it to one such as https://huggingface.co, or to nothing"),
    (httpx.HTTPError, "{endpoint} cannot be reached ({error}); check the network and HF_ENDPOINT"),
    # A download had another size than announced, or the disk failed.
    (OSError, "{error}; run the same command again"),
    # The library refuses some requests before it sends them, such as a card's metadata.
    (Exception, "{error}"),
)
"""The message for an error of the library, by `_status` if it is empty; the first class that fits counts."""
_ADDRESS: Final = re.compile(r"https?://\S+", re.IGNORECASE)


class Listing(NamedTuple):
    """A repository at a revision; what the hub does not tell is None.

    Attributes:
        commit: The commit of the revision.
        sizes: The sizes of its files by path, in bytes.
        is_private: Whether only some may see the repository.
    """

    commit: str
    sizes: Mapping[str, int | None]
    is_private: bool | None


def hub_api() -> HfApi:
    """The hub by HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE, as huggingface_hub reads them."""
    return HfApi(library_name="kvtuner")


def is_unanswered(error: HubError) -> bool:
    """Whether the hub said nothing of a repository, which may be there or not.

    It could not be reached, HF_HUB_OFFLINE forbids to ask it, or somebody who is not logged in sees no private one.
    """
    if constants.HF_HUB_OFFLINE or isinstance(error.__cause__, httpx.TransportError):
        return True
    return get_token() is None and str(error).endswith(ABSENT)


def unfetched_reason(error: BaseException | None) -> str | None:
    """Why neither a hub nor its cache gave a model that a library asked for, and the way out; None for other errors."""
    if not isinstance(error, LocalEntryNotFoundError):
        return None
    asked = "no hub is asked (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "no hub answers"
    tip = "" if constants.HF_HUB_OFFLINE else ". With HF_HUB_OFFLINE=1 no hub is asked, nor waited for"
    return (
        f"{asked}, and its cache on this machine does not hold all of the model; give a folder, or fetch it first{tip}"
    )


def list_files(repo: str, revision: str | None) -> Listing:
    """List a repository at a branch, a tag or a commit, at the main branch by default; or raise `HubError`."""
    what = f"{repo}@{revision or 'main'}"
    with hub_errors(what):
        info = hub_api().model_info(repo, revision=revision, files_metadata=True, timeout=ANSWER_S)
    if not isinstance(info.sha, str) or not is_commit(info.sha):
        raise HubError(f"{what}: the hub does not say which commit it is; check HF_ENDPOINT")
    if revision is not None and is_commit(revision) and info.sha != revision:
        raise HubError(f"{what}: the hub answers with another commit, {info.sha}; name what you mean in full")
    return Listing(info.sha, {file.rfilename: file.size for file in info.siblings or ()}, info.private)


def fetch_file(reference: HubReference, size: int | None, limit: int) -> bytes:
    """Fetch the content of a file at a commit, of `size` bytes and at most `limit`.

    Raises:
        OversizedFileError: The file is larger than the limit, or its size is not known.
        HubError: The file cannot be had.
    """
    if size is None:
        raise OversizedFileError(f"{reference} may have any size: the hub does not tell it; ask its owner")
    _check_size(reference, size, limit, more="")

    class BoundedProgress(tqdm):  # type: ignore[misc]  # tqdm has no types here
        """Shows nothing, and ends what is announced as too large, or grows so: a server may send more than it says."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.seen = 0
            # Xet swallows what `update` raises, and downloads to the end.
            _check_size(reference, kwargs.get("total") or 0, limit)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.seen += int(n or 0)
            _check_size(reference, self.seen, limit)

    try:
        # The library's own cache believes a commit's file whatever became of it, so each fetch has one of its own.
        with tempfile.TemporaryDirectory(prefix="kvtuner-") as folder:
            with hub_errors(str(reference)):
                path = hub_api().hf_hub_download(
                    reference.repo,
                    reference.path,
                    revision=reference.revision,
                    cache_dir=folder,
                    tqdm_class=BoundedProgress,
                )
            data = first_bytes(Path(path), limit + 1)
    except OSError as error:
        raise HubError(
            f"{reference}: no temporary file can be kept ({error.strerror or error}); set TMPDIR to another folder"
        ) from error
    _check_size(reference, len(data), limit)
    return data


def _check_size(reference: HubReference, size: float, limit: int, more: str = " or more") -> None:
    if size > limit:
        raise OversizedFileError(f"{reference} has {size} bytes{more}, above {limit}; this is none of ours")


@contextmanager
def hub_errors(what: str, *, conflict: str = "") -> Iterator[None]:
    """Bound the time of answers, and turn the failures of huggingface_hub into `HubError`.

    Only calls of that library belong inside: nearly every error there is its failure, and a fault of other code would
    be called the hub's. Messages begin with `what`, such as ``me/model@main``; `conflict` is the one where something
    else was there first.
    """
    session = get_session()
    before = session.timeout
    session.timeout = ANSWER_S
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, EntryNotFoundError, OSError, ValueError, RuntimeError, *_TRIPS) as error:
        raise HubError(f"{what}: {_reason(error, conflict)}") from error
    finally:
        session.timeout = before


def _reason(error: Exception, conflict: str) -> str:
    cause = error.__cause__
    # The library uploads in threads and wraps their errors.
    if isinstance(error, LocalEntryNotFoundError | RuntimeError) and isinstance(cause, Exception):
        return _reason(cause, conflict)
    reason = next(reason for kinds, reason in _REASONS if isinstance(error, kinds))
    if not reason and isinstance(error, HfHubHTTPError):
        return _status(error, conflict)
    return reason.format(error=_short(error), endpoint=_public(constants.ENDPOINT))


def _status(error: HfHubHTTPError, conflict: str) -> str:
    status = error.response.status_code
    if status == 401:
        return ABSENT if get_token() is None else f"the hub refuses this token; {LOG_IN} with another"
    if status == 403:
        return f"this token may not do that; {LOG_IN} with one that may write here"
    if status in (409, 412) and conflict:
        return conflict
    if status == 429:
        after = error.response.headers.get("Retry-After", "")
        when = f"in {after} seconds" if after.isdigit() else "later"
        return f"the hub's rate limit is reached; try again {when}, or {LOG_IN} for a higher one"
    if status >= 500:
        return f"the hub answers {status}; try again later"
    return f"the hub answers {status}: {_short(error)}"


def _public(address: str) -> str:
    """An address without passwords and signed queries."""
    try:
        parts = urlsplit(address)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "an address that cannot be read"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def _short(error: BaseException) -> str:
    """An error in one line, as a terminal shows it, with public addresses alone."""
    text = _ADDRESS.sub(lambda match: _public(match[0]), str(error))
    return one_line(HubError(text or type(error).__name__))
