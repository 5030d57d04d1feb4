"""OpenSSF's model-signing, imported when it is needed, and Sigstore's servers within a time. Knows no profiles."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvtuner.errors import SignatureError

if TYPE_CHECKING:
    from collections.abc import Callable

ResultT = TypeVar("ResultT")

NETWORK_SECONDS: Final = 60.0
"""That Sigstore's servers get: some of its requests have no end of their own."""
PERSON_SECONDS: Final = 600.0
"""That somebody gets to log in."""


@dataclass(frozen=True, slots=True)
class Library:
    """The modules of model-signing."""

    signing: Any
    verifying: Any


def library() -> Library:
    """OpenSSF's library.

    Raises:
        SignatureError: it is not installed.
    """
    try:
        import cryptography  # noqa: F401  # for the keys
        import OpenSSL  # noqa: F401  # model-signing 1.1 imports it and does not say so
        from model_signing import signing, verifying
    except ImportError as error:
        raise SignatureError(f"signatures need a library ({error}): pip install 'kvtuner[sign]'") from error
    return Library(signing, verifying)


def bounded(call: Callable[[], ResultT], seconds: float) -> ResultT:
    """What a call of Sigstore's servers gives.

    Raises:
        SignatureError: it fails, or takes longer.
    """
    results: list[ResultT] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again below, in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True, name="kvtuner-sigstore")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise SignatureError(f"Sigstore did not answer within {seconds:g} s; check the network, or sign with a key")
    try:
        if failures:
            raise failures[0]
    except sigstore_errors() as error:
        raise SignatureError(f"Sigstore refuses, or cannot be reached: {_chain(error)}; check the network") from error
    return results[0]


def sigstore_errors() -> tuple[type[Exception], ...]:
    """What Sigstore's client raises: it has no base of all, and names some in private only."""
    import requests
    from sigstore import errors, oidc
    from sigstore._internal.fulcio.client import ExpiredCertificate, FulcioClientError
    from sigstore._internal.rekor import RekorClientError
    from sigstore._internal.timestamp import TimestampError

    named = (ExpiredCertificate, FulcioClientError, RekorClientError, TimestampError)
    return (errors.Error, oidc.ExpiredIdentity, oidc.IssuerError, requests.RequestException, OSError, EOFError, *named)


def _chain(error: BaseException) -> str:
    """An error and what it came from, for the first alone says little."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 3:
        text = " ".join(str(cause).split())[:200] or type(cause).__name__
        texts.append(text)
        cause = cause.__cause__
    return ": ".join(texts)
