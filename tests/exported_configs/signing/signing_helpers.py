"""What tests of signatures share; loaded by them, since test folders are no packages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import SignatureError
from kvtuner.exported_configs.signing.signatures import SignerIdentity, load_verified, signature_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAYLOAD_TYPE = "application/vnd.in-toto+json"


def why(path: Path, identity: SignerIdentity | str) -> str:
    """The line that a verification is refused with."""
    identity = SignerIdentity.parse(identity) if isinstance(identity, str) else identity
    with pytest.raises(SignatureError) as refused:
        load_verified(path, identity)
    message = str(refused.value)
    assert message.isprintable() and 20 < len(message) < 600
    return message


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a signature's JSON."""
    target = signature_path(path)
    document = json.loads(target.read_bytes())
    change(document)
    target.write_text(json.dumps(document))


def dsse(payload: bytes) -> bytes:
    """What a signature of a payload is computed over."""
    return b"DSSEv1 %d %b %d %b" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)
