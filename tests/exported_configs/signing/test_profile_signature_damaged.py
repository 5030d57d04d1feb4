"""Signatures that are damaged or forged: refused in one line before or by the library, never let through."""

from __future__ import annotations

import base64
import json
import os
import random
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from signature_checks import dsse, edit, why

from kvtuner.errors import SignatureError
from kvtuner.exported_configs.signing.profile_signature import sign_profile, signature_path, verify_profile
from kvtuner.exported_configs.signing.signer import Signer, SignerIdentity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtuner.exported_configs.profile.profile import Profile

    Keys = Callable[..., "tuple[Path, Path]"]


def forge(path: Path, private_key: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a signature says and sign that with a key, as the key's owner could."""
    key = serialization.load_pem_private_key(private_key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)

    def again(document: dict[str, Any]) -> None:
        envelope = document["dsseEnvelope"]
        statement = json.loads(base64.b64decode(envelope["payload"]))
        change(statement)
        payload = json.dumps(statement).encode()
        envelope["payload"] = base64.b64encode(payload).decode()
        signature = key.sign(dsse(payload), ec.ECDSA(hashes.SHA256()))
        envelope["signatures"][0]["sig"] = base64.b64encode(signature).decode()

    edit(path, again)


def test_named_pipe_is_refused_and_not_waited_for(signed: Path, keys: Keys) -> None:
    private, public = keys()
    for path, noun in ((signature_path(signed), "signature"), (public, "PEM file")):
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(SignatureError, match=rf"{path.name}: the {noun} cannot be read \(a named pipe"):
            verify_profile(signed, SignerIdentity.parse(f"key:{public}"))
        path.unlink()
        sign_profile(signed, Signer(private))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "must be JSON"),
        (b"\x00" * 40, "must be JSON"),
        (b"[]", "must be a JSON object, not list"),
        (b"{}", "verificationMaterial: the field is missing"),
        (b"\xff", "must be UTF-8"),
        (b"[" * 2**19, "must nest at most 16 deep"),
        (b'{"a": 1, "a": 1}', "stands twice"),
        (b" " * (2**20 + 1), "a signature has at most 1048576 bytes"),
    ],
    ids=["empty", "zeros", "list", "object", "latin", "deep", "twice", "large"],
)
def test_damaged_signature_is_refused(signed: Path, keys: Keys, data: bytes, words: str) -> None:
    signature_path(signed).write_bytes(data)
    assert words in why(signed, f"key:{keys()[1]}")


@pytest.mark.parametrize(
    ("steps", "value", "words"),
    [
        (("dsse_envelope",), {}, "dsse_envelope: unknown field"),
        (("mediaType",), "text/plain", "1 validation error"),
        (("mediaType",), 7, "1 validation error"),
        (("verificationMaterial",), [], "verificationMaterial: must be a valid dictionary"),
        (("verificationMaterial", "certificate"), {"rawBytes": ""}, "a key's hint or certificates, not 2 of them"),
        (("verificationMaterial",), {"tlogEntries": []}, "a key's hint or certificates, not 0 of them"),
        (("verificationMaterial", "tlogEntries"), "none", "1 validation error"),
        (("verificationMaterial", "publicKey", "hint"), "", "publicKey.hint: String should match pattern"),
        (("verificationMaterial", "publicKey"), {"hint": None}, "publicKey.hint: must be a valid string"),
        (("verificationMaterial", "publicKey"), {}, "publicKey.hint: the field is missing"),
        (("verificationMaterial", "publicKey", "rawBytes"), "AAAA", "rawBytes: unknown field"),
        (("verificationMaterial", "x509_certificate_chain"), {}, "x509_certificate_chain: unknown field"),
        (("dsseEnvelope", "Payload"), "e30=", "dsseEnvelope.Payload: unknown field"),
        (("foo",), 1, "foo: unknown field"),
        (("dsseEnvelope", "payload"), "????", "dsseEnvelope.payload: must be base64"),
        (("dsseEnvelope", "payload"), "e30=", "_type: the field is missing"),
        (("dsseEnvelope", "payload"), "W10=", "the signature must be a JSON object, not list"),
        (("dsseEnvelope", "payloadType"), "x", "payloadType: must be"),
        (("dsseEnvelope", "signatures"), [], "signatures: List should have at least 1 item"),
        (("dsseEnvelope", "signatures", 0, "sig"), "AAAA", "did not make it, so it is forged or damaged"),
        (("dsseEnvelope", "signatures", 0, "sig"), 5, "1 validation error"),
        (("dsseEnvelope", "signatures", 0), "x", "1 validation error"),
    ],
)
def test_damaged_part_of_a_signature_is_refused(
    signed: Path, keys: Keys, put: Any, steps: tuple[Any, ...], value: Any, words: str
) -> None:
    target = signature_path(signed)
    target.write_text(json.dumps(put(json.loads(target.read_bytes()), steps, value)))
    assert words in why(signed, f"key:{keys()[1]}")


def resource(statement: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = statement["predicate"]["resources"][0]
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update(predicateType="https://model_signing/Digests/v0.1"), "predicateType: must be"),
        (lambda s: s["predicate"].update(resources=[]), "resources: List should have at least 1 item"),
        (lambda s: s["predicate"]["resources"].append(resource(s)), "resources: List should have at most 1 item"),
        (lambda s: resource(s).update(name="profile.json"), "name: must be '.', not 'profile.json'"),
        (lambda s: resource(s).update(algorithm="blake2b"), "algorithm: must be 'sha256'"),
        (lambda s: resource(s).update(digest="0" * 64), "was changed after it was signed"),
        (lambda s: resource(s).update(digest="x"), "resources[0].digest: String should match pattern"),
        (lambda s: s["predicate"]["serialization"].update(method="shards"), "method: must be 'files'"),
        (lambda s: s["predicate"]["serialization"].update(ignore_paths=["."]), "Signature mismatch"),
        (lambda s: s["predicate"]["serialization"].update(hash_type="md5"), "hash_type: must be 'sha256', not 'md5'"),
        (lambda s: s["predicate"].update(serialization={"method": "files"}), "hash_type: the field is missing"),
        (lambda s: s["predicate"]["serialization"].update(allow_symlinks=1), "allow_symlinks: must be a valid boolean"),
        (lambda s: s["predicate"]["serialization"].update(ignore_paths=[1]), "ignore_paths[0]: must be a valid string"),
        (lambda s: s.update(subject=[]), "subject: List should have at least 1 item"),
        (lambda s: s["subject"][0].update(digest={"sha256": "00"}), "Manifest is inconsistent"),
        (lambda s: s["subject"].append(s["subject"][0]), "subject: List should have at most 1 item"),
        (lambda s: s["subject"][0].pop("digest"), "the field is missing"),
        (lambda s: s["subject"][0].update(name="\x1b[2J"), "must name a file, not"),
    ],
)
def test_statement_of_the_keys_owner_about_something_else_is_refused(
    signed: Path, keys: Keys, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    forge(signed, keys()[0], change)
    assert words in why(signed, f"key:{keys()[1]}")


def test_forging_by_hand_would_be_let_through_were_the_statement_right(signed: Path, keys: Keys) -> None:
    """So that the refusals above are of what is said and not of how it was signed."""
    forge(signed, keys()[0], lambda statement: statement["subject"][0].update(name="other name.json"))
    assert verify_profile(signed, SignerIdentity.parse(f"key:{keys()[1]}"))


def test_signature_of_a_folder_is_no_profiles(signed: Path, keys: Keys, tmp_path: Path) -> None:
    from model_signing import signing

    folder = tmp_path / "empty"
    folder.mkdir()
    signing.Config().use_elliptic_key_signer(private_key=keys()[0]).sign(folder, signature_path(signed))
    assert "resources: List should have at least 1 item" in why(signed, f"key:{keys()[1]}")


def test_mutated_signatures_are_refused_in_one_line_or_say_the_same(signed: Path, keys: Keys, profile: Profile) -> None:
    """Base64 has bits that say nothing, JSON has spaces: what is accepted loads the same bytes."""
    generator, target = random.Random(0), signature_path(signed)
    pristine, identity = target.read_bytes(), SignerIdentity.parse(f"key:{keys()[1]}")
    accepted = 0
    for _ in range(200):
        data = bytearray(pristine)
        for _ in range(generator.randint(1, 2)):
            start = generator.randrange(len(data))
            data[start : start + generator.choice([0, 1, 1, 1, 9])] = generator.randbytes(generator.choice([0, 1, 1]))
        target.write_bytes(data)
        try:
            accepted += verify_profile(signed, identity).profile.digest == profile.digest
        except SignatureError as error:
            assert str(error).isprintable() and len(str(error)) < 600
    assert accepted < 20
