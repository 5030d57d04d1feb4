"""The failures of the hub, in one line each with advice. Never names a token or a password.

Imported only where huggingface_hub is.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import httpx
from huggingface_hub import constants, get_token
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
from kvtuner.exported_configs.profile.document import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG_IN: Final = "log in (hf auth login) or set HF_TOKEN"
ABSENT: Final = f"there is no such repository, or it is private; check the name, or {LOG_IN}"
_OF_THE_HUB: Final = (
    HfHubHTTPError,
    EntryNotFoundError,
    OfflineModeIsEnabled,
    FileMetadataError,
    HFValidationError,
    httpx.HTTPError,
    json.JSONDecodeError,
)
# An answer that is JSON but not the hub's: the library takes it apart and trips.
_OF_ANSWERS: Final = (KeyError, TypeError, AttributeError, IndexError, RecursionError)
_ADDRESS: Final = re.compile(r"https?://[^\s'\"]+")


@contextmanager
def refusing(what: str, conflict: str = "") -> Iterator[None]:
    """Turn the failures of huggingface_hub into one error.

    Args:
        what: The beginning of every message, such as ``me/model@main``.
        conflict: The message where something else was there first.

    Raises:
        HubError: anything failed.
    """
    try:
        yield
    except _OF_THE_HUB as error:
        raise HubError(f"{what}: {_reason(error, conflict)}") from error
    except _OF_ANSWERS as error:
        raise HubError(f"{what}: {_not_a_hub()}") from error
    except ValueError as error:
        # The library refuses some requests before it sends them, such as a card's metadata.
        raise HubError(f"{what}: {_short(error)}") from error
    except RuntimeError as error:
        # The library uploads in threads and wraps their errors.
        cause = error.__cause__
        reason = _reason(cause, conflict) if isinstance(cause, _OF_THE_HUB) else _short(error)
        raise HubError(f"{what}: {reason}") from error
    except OSError as error:
        # A download had another size than announced, or the disk failed.
        raise HubError(f"{what}: {_short(error)}; run the same command again") from error


def _reason(error: Exception, conflict: str) -> str:
    cause = error.__cause__
    if isinstance(error, LocalEntryNotFoundError) and isinstance(cause, Exception):
        return _reason(cause, conflict)
    if isinstance(error, OfflineModeIsEnabled | LocalEntryNotFoundError):
        return "HF_HUB_OFFLINE is set; unset it, or name a file"
    if isinstance(error, GatedRepoError):
        return f"is gated; accept its terms on its page, then {LOG_IN}"
    if isinstance(error, RepositoryNotFoundError):
        return ABSENT
    if isinstance(error, RevisionNotFoundError):
        return "the repository has no such revision (removed, or renamed); see its history for the one you mean"
    if isinstance(error, EntryNotFoundError):
        return "the repository has no such file there; name another as owner/name@revision:path"
    if isinstance(error, DisabledRepoError):
        return "the hub has disabled this repository"
    if isinstance(error, HfHubHTTPError):
        return _status(error, conflict)
    if isinstance(error, HFValidationError):
        return f"the hub does not allow this name ({_short(error)})"
    if isinstance(error, FileMetadataError | json.JSONDecodeError):
        return _not_a_hub()
    return f"{_endpoint()} cannot be reached ({_short(error)}); check the network and HF_ENDPOINT"


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


def _not_a_hub() -> str:
    return f"{_endpoint()} does not answer as a hub does; check HF_ENDPOINT and proxies"


def _endpoint() -> str:
    return _public(constants.ENDPOINT)


def _public(address: str) -> str:
    """An address without passwords and signed queries."""
    try:
        parts = urlsplit(address)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "an address that is none"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def _short(error: BaseException) -> str:
    """An error in one line, as a terminal shows it, with public addresses alone."""
    line = " ".join(str(error).split()) or type(error).__name__
    return one_line(HubError(_ADDRESS.sub(lambda match: _public(match[0]), line)))
