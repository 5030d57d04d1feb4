"""What goes wrong between here and the hub, in one line each with the way out. Never names a token.

Imported only where huggingface_hub is.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import httpx
from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kvtuner.errors import HubError

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG_IN: Final = "log in (hf auth login) or set HF_TOKEN"


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Word the failures of huggingface_hub.

    Args:
        what: is asked for, such as ``me/model@main``: begins every message.

    Raises:
        HubError: whatever failed.
    """
    try:
        yield
    except (HfHubHTTPError, EntryNotFoundError, OfflineModeIsEnabled, FileMetadataError, HFValidationError) as error:
        raise HubError(f"{what}: {_words(error)}") from error
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        raise HubError(f"{what}: {_words(error)}") from error
    except RuntimeError as error:
        # An upload in one of the library's threads.
        if not isinstance(error.__cause__, httpx.HTTPError):
            raise
        raise HubError(f"{what}: {_words(error.__cause__)}") from error
    except OSError as error:
        # Of a download whose size is not what the hub said, and of disks.
        raise HubError(f"{what}: {_short(error)}; run the same command again") from error


def _words(error: Exception) -> str:
    cause = error.__cause__
    if isinstance(error, LocalEntryNotFoundError) and isinstance(cause, Exception):
        return _words(cause)
    if isinstance(error, OfflineModeIsEnabled | LocalEntryNotFoundError):
        return "HF_HUB_OFFLINE is set and it was never fetched; pull it once without, or name a file"
    if isinstance(error, GatedRepoError):
        return f"is gated; accept its terms on its page, then {LOG_IN}"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no such repository, or it is private; check the name, or {LOG_IN}"
    if isinstance(error, RevisionNotFoundError):
        return "the repository has no such revision (removed, or renamed); see its history for the one you mean"
    if isinstance(error, EntryNotFoundError):
        return "the repository has no such file there; name another as owner/name@revision:path"
    if isinstance(error, DisabledRepoError):
        return "the hub has disabled this repository"
    if isinstance(error, HfHubHTTPError):
        return _status(error)
    if isinstance(error, HFValidationError):
        return f"the hub does not allow this name ({_short(error)})"
    if isinstance(error, FileMetadataError | json.JSONDecodeError):
        return f"{constants.ENDPOINT} does not answer as a hub does; check HF_ENDPOINT and proxies"
    return f"{constants.ENDPOINT} cannot be reached ({_short(error)}); check the network and HF_ENDPOINT"


def _status(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status == 401:
        return f"the hub refuses this token; {LOG_IN} with another"
    if status == 403:
        return f"this token may not do that; {LOG_IN} with one that may write here"
    if status in (409, 412):
        return "the branch moved while this was pushed; run the same command again to see what is there now"
    if status == 429:
        after = error.response.headers.get("Retry-After", "")
        when = f"in {after} seconds" if after.isdigit() else "later"
        return f"the hub's rate limit is reached; try again {when}, or {LOG_IN} for a higher one"
    if status >= 500:
        return f"the hub answers {status}; try again later"
    return f"the hub answers {status}: {_short(error)}"


def _short(error: Exception) -> str:
    """The first line of an error, as a terminal shows it."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "".join(c if c.isprintable() else "?" for c in line)[:200]
