"""Sigstore without its servers: refused in one line and within a time. No signature of its own was ever made here."""

from __future__ import annotations

import base64
import datetime
import hashlib
import importlib
import json
import socket
import time
from typing import TYPE_CHECKING

import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from kvtuner.errors import SignatureError
from kvtuner.exported_configs.signing import signer
from kvtuner.exported_configs.signing.profile_signature import (
    sign_profile,
    signature_path,
    signed_by,
    verify_profile,
)
from kvtuner.exported_configs.signing.signature_bundle import read_bundle
from kvtuner.exported_configs.signing.signer import Signer, SignerIdentity, call_with_timeout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


ME = SignerIdentity.parse("sigstore:me@example.org,https://accounts.google.com")


@pytest.fixture(autouse=True)
def unplugged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No home and no network: every request goes to a port where nobody listens."""
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "ACTIONS_ID_TOKEN_REQUEST_TOKEN", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every request goes to somebody who takes the call and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name in ("https_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


def certificate() -> bytes:
    """A certificate as Sigstore makes them: no subject, a mail address and who vouched for it."""
    key, nobody = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    issuer = x509.UnrecognizedExtension(
        x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.8"), b"\x0c\x1bhttps://accounts.google.com"
    )
    start = datetime.datetime(2026, 1, 1)
    certificate = (
        x509.CertificateBuilder(nobody, nobody, key.public_key(), 1, start, start)
        .add_extension(x509.SubjectAlternativeName([x509.RFC822Name("me@example.org")]), critical=True)
        .add_extension(issuer, critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.DER)


def self_made(file: Path) -> bytes:
    """A bundle as Sigstore writes it, but for its log's entry and a signature."""
    digest = hashlib.sha256(file.read_bytes())
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": file.name, "digest": {"sha256": hashlib.sha256(digest.digest()).hexdigest()}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False},
            "resources": [{"name": ".", "algorithm": "sha256", "digest": digest.hexdigest()}],
        },
    }
    bundle = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {
            "certificate": {"rawBytes": base64.b64encode(certificate()).decode()},
            "tlogEntries": [],
        },
        "dsseEnvelope": {
            "payload": base64.b64encode(json.dumps(statement).encode()).decode(),
            "payloadType": "application/vnd.in-toto+json",
            "signatures": [{"sig": "AAAA"}],
        },
    }
    return json.dumps(bundle).encode()


def test_verification_without_a_network_is_refused_soon(file: Path) -> None:
    signature_path(file).write_bytes(self_made(file))
    start = time.monotonic()
    with pytest.raises(SignatureError, match=r"Sigstore refuses, or cannot be reached: .*; check the network"):
        verify_profile(file, ME)
    assert time.monotonic() - start < 20


def test_signing_without_a_network_is_refused_soon(file: Path) -> None:
    start = time.monotonic()
    for sigstore in (Signer(), Signer(identity_token="no.real.token")):
        with pytest.raises(SignatureError, match="Sigstore refuses, or cannot be reached"):
            sign_profile(file, sigstore)
    assert time.monotonic() - start < 20
    assert not signature_path(file).exists()


def test_servers_that_never_answer_are_given_up(file: Path, deaf: None, monkeypatch: pytest.MonkeyPatch) -> None:
    signature_path(file).write_bytes(self_made(file))
    monkeypatch.setattr(signer, "NETWORK_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(SignatureError, match=r"Sigstore did not answer within 0.5 s"):
        verify_profile(file, ME)
    assert time.monotonic() - start < 10


def test_changed_file_is_refused_before_anybody_is_asked(file: Path, deaf: None) -> None:
    signature_path(file).write_bytes(self_made(file))
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(SignatureError, match="was changed after it was signed"):
        verify_profile(file, ME)


def test_who_signed_is_read_from_the_certificate(file: Path) -> None:
    assert signed_by(read_bundle(self_made(file))) == "me@example.org, https://accounts.google.com"


def errors_of_sigstore() -> set[type[Exception]]:
    """Every error that its client defines, by the modules that name them; three of these are private."""
    found: set[type[Exception]] = set()
    for name in (
        "errors",
        "oidc",
        "models",
        "dsse",
        "_internal.fulcio.client",
        "_internal.rekor",
        "_internal.timestamp",
    ):
        members = vars(importlib.import_module(f"sigstore.{name}")).values()
        found |= {
            kind
            for kind in members
            if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__.startswith("sigstore.")
        }
    return found


def test_what_sigstore_raises_is_known_and_all_else_goes_through() -> None:
    def fail(error: Exception) -> None:
        raise error

    from sigstore._internal.fulcio.client import FulcioClientError

    class Derived(FulcioClientError):  # type: ignore[misc]
        __module__ = "elsewhere"

    known = errors_of_sigstore()
    names = {kind.__name__ for kind in known}
    assert {"Error", "NetworkError", "ExpiredIdentity", "RekorClientError", "TimestampError"} <= names
    refused = []
    for kind in (*known, Derived, OSError, EOFError, requests.RequestException, requests.ConnectTimeout):
        error = kind.__new__(kind, "no luck")  # whatever else its constructor wants
        with pytest.raises(SignatureError, match=r"cannot be reached: .*; check the network"):
            call_with_timeout(lambda error=error: fail(error), 10)
        refused.append(kind)
    assert len(refused) == len(known) + 5 >= 15
    for other in (ZeroDivisionError("1"), ValueError("2"), RuntimeError("3"), AttributeError("4")):
        with pytest.raises(type(other), match=str(other)):
            call_with_timeout(lambda other=other: fail(other), 10)
    ran: list[int] = []
    call_with_timeout(lambda: ran.append(1), 10)
    assert ran == [1]
