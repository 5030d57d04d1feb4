"""Signatures with real keys and certificates: who is let through, and in which words everybody else is not."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa
from signature_checks import dsse, edit, why

from kvtuner.errors import ProfileError, SignatureError
from kvtuner.exported_configs.profile.build import dump_profile
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.signing.profile_signature import (
    sign_profile,
    signature_path,
    verify_profile,
)
from kvtuner.exported_configs.signing.signer import Signer, SignerIdentity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtuner.exported_configs.profile.profile import Profile

    Keys = Callable[..., "tuple[Path, Path]"]

HASHES = {"secp256r1": hashes.SHA256, "secp384r1": hashes.SHA384, "secp521r1": hashes.SHA512}
CURVES = [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()]


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.name)
def test_signature_by_a_key_is_good_for_us_the_library_and_by_hand(
    file: Path, keys: Keys, curve: ec.EllipticCurve, profile: Profile
) -> None:
    from model_signing import verifying

    private, public = keys(curve=curve)
    target = sign_profile(file, Signer(private))
    assert target == file.with_name("profile.json.sig")
    verified = verify_profile(file, SignerIdentity.parse(f"key:{public}"))
    assert verified.profile == profile
    assert verified.signed_by == f"key {hashlib.sha256(public.read_bytes()).hexdigest()}"
    assert verify_profile(file, SignerIdentity.parse(f"key:{public}")).profile.digest == profile.digest
    verifying.Config().use_elliptic_key_verifier(public_key=public).verify(file, target)

    key = serialization.load_pem_public_key(public.read_bytes())
    assert isinstance(key, ec.EllipticCurvePublicKey)
    envelope = json.loads(target.read_bytes())["dsseEnvelope"]
    payload, signature = (base64.b64decode(text) for text in (envelope["payload"], envelope["signatures"][0]["sig"]))
    key.verify(signature, dsse(payload), ec.ECDSA(HASHES[curve.name]()))
    statement = json.loads(payload)
    assert statement["subject"][0]["name"] == "profile.json"
    assert statement["predicate"]["resources"] == [
        {"name": ".", "algorithm": "sha256", "digest": hashlib.sha256(file.read_bytes()).hexdigest()}
    ]


def test_signature_that_the_library_made_alone_is_good(file: Path, keys: Keys) -> None:
    from model_signing import signing

    private, public = keys()
    signing.Config().use_elliptic_key_signer(private_key=private).sign(file, signature_path(file))
    assert verify_profile(file, SignerIdentity.parse(f"key:{public}"))


def test_changed_file_is_refused_wherever_it_is_changed(signed: Path, keys: Keys) -> None:
    data = signed.read_bytes()
    for place in (0, len(data) // 2, len(data) - 1):
        signed.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert "profile.json was changed after it was signed" in why(signed, f"key:{keys()[1]}")
    signed.write_bytes(data + b"\n")
    assert "was changed after it was signed" in why(signed, f"key:{keys()[1]}")


def test_another_key_is_refused_by_its_name(signed: Path, keys: Keys) -> None:
    _, other = keys("other")
    message = why(signed, f"key:{other}")
    assert "Key mismatch" in message and str(other) in message
    hint = hashlib.sha256(other.read_bytes()).hexdigest()
    edit(signed, lambda bundle: bundle["verificationMaterial"]["publicKey"].update(hint=hint))
    assert "that key did not make it, so it is forged or damaged" in why(signed, f"key:{other}")


def test_signature_of_another_file_is_told_from_a_changed_file(signed: Path, keys: Keys, make_profile: Any) -> None:
    other = signed.with_name("other.json")
    other.write_bytes(dump_profile(make_profile(symmetric=True)))
    mine, theirs = signature_path(signed), sign_profile(other, Signer(keys()[0]))
    first, second = mine.read_bytes(), theirs.read_bytes()
    mine.write_bytes(second)
    theirs.write_bytes(first)
    assert "it is the signature of another file, 'other.json'" in why(signed, f"key:{keys()[1]}")
    assert "it is the signature of another file, 'profile.json'" in why(other, f"key:{keys()[1]}")


def test_renamed_profile_is_good_with_its_renamed_signature_only(signed: Path, keys: Keys) -> None:
    renamed = signed.rename(signed.with_name("\u00fcnver\u00e4ndert.json"))
    assert "there is no such signature" in why(renamed, f"key:{keys()[1]}")
    signature_path(signed).rename(signature_path(renamed))
    assert verify_profile(renamed, SignerIdentity.parse(f"key:{keys()[1]}"))


def test_link_is_verified_but_not_signed(signed: Path, keys: Keys, tmp_path: Path) -> None:
    """Every file is a link to a blob in the hub's cache."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number, path in enumerate((signed, signature_path(signed))):
        (snapshot / path.name).symlink_to(path.rename(blobs / f"{number}"))
    link = snapshot / "profile.json"
    assert verify_profile(link, SignerIdentity.parse(f"key:{keys()[1]}"))
    with pytest.raises(SignatureError, match="is a link, and its signature would not stand beside the file; sign /"):
        sign_profile(link, Signer(keys()[0]))
    (blobs / "0").write_bytes(b"{}")
    assert "was changed" in why(link, f"key:{keys()[1]}")


@pytest.mark.parametrize(
    "make",
    [
        lambda: rsa.generate_private_key(65537, 1024),
        ed25519.Ed25519PrivateKey.generate,
        lambda: dsa.generate_private_key(1024),
        lambda: ec.generate_private_key(ec.SECP256K1()),
    ],
    ids=["rsa", "ed25519", "dsa", "secp256k1"],
)
def test_key_of_another_kind_is_refused(signed: Path, keys: Keys, make: Callable[[], Any]) -> None:
    private, public = keys("odd", key=make())
    before = signature_path(signed).read_bytes()
    with pytest.raises(
        SignatureError, match=r"odd.*pem cannot sign: .*; give the PEM file of a key of P-256, P-384 or"
    ):
        sign_profile(signed, Signer(private))
    assert signature_path(signed).read_bytes() == before
    assert "by a key of P-256, P-384 or P-521" in why(signed, f"key:{public}")


def test_every_way_to_give_a_wrong_password_has_its_words(file: Path, keys: Keys) -> None:
    locked, public = keys("locked", password=b"open sesame")
    for signer, words in (
        (Signer(locked), "Password was not given but private key is encrypted; .* name its password's variable"),
        (Signer(locked, b"sesame"), "cannot sign: .*; give the PEM file of a key .*, and the right password if it has"),
        (Signer(keys()[0], b"any"), "Password was given but private key is not encrypted"),
    ):
        with pytest.raises(SignatureError, match=words):
            sign_profile(file, signer)
        assert not signature_path(file).exists()
    sign_profile(file, Signer(locked, b"open sesame"))
    assert verify_profile(file, SignerIdentity.parse(f"key:{public}"))


def test_files_that_hold_no_key_are_refused(signed: Path, keys: Keys, tmp_path: Path) -> None:
    private, public = keys()
    junk, huge = tmp_path / "junk.pem", tmp_path / "huge.pem"
    junk.write_bytes(b"\xffnothing")
    huge.write_bytes(public.read_bytes() + b"\n" * 2**20)
    for path, words in (
        (tmp_path / "absent.pem", "there is no such PEM file; give its path"),
        (tmp_path, "Is a directory"),
        (junk, "it is not by key:"),
        (private, "it is not by key:"),
        (huge, "a PEM file has at most 1048576 bytes"),
    ):
        assert words in why(signed, f"key:{path}")
    for path, words in (
        (public, "pub.pem cannot sign: .*; give the PEM file of a key of P-256"),
        (tmp_path / "absent.pem", "absent.pem: there is no such PEM file; give its path"),
    ):
        with pytest.raises(SignatureError, match=words):
            sign_profile(signed, Signer(path))


def test_profile_that_is_none_is_not_signed(tmp_path: Path, keys: Keys) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(SignatureError, match="there is no such profile; give its path"):
        sign_profile(path, Signer(keys()[0]))
    path.write_bytes(b"{}")
    with pytest.raises(ProfileError, match=r"profile.json: schema_version must be 1"):
        sign_profile(path, Signer(keys()[0]))
    assert list(tmp_path.glob("*.sig")) == []


def test_signed_bytes_that_are_no_profile_are_refused_as_such(file: Path, keys: Keys) -> None:
    from model_signing import signing

    private, public = keys()
    file.write_bytes(b'{"schema_version": 3}')
    signing.Config().use_elliptic_key_signer(private_key=private).sign(file, signature_path(file))
    with pytest.raises(ProfileError, match=r"profile.json: schema_version is 3, but this kvtuner reads 1 to 2"):
        verify_profile(file, SignerIdentity.parse(f"key:{public}"))


def test_what_is_loaded_is_what_was_verified(
    signed: Path, keys: Keys, profile: Profile, make_profile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, other = SignerIdentity.verify, dump_profile(make_profile(symmetric=True))

    def swap_then_check(*args: Any) -> None:
        signed.write_bytes(other)
        real(*args)
        signature_path(signed).write_bytes(b"gone")

    monkeypatch.setattr(SignerIdentity, "verify", swap_then_check)
    assert verify_profile(signed, SignerIdentity.parse(f"key:{keys()[1]}")).profile.digest == profile.digest
    assert load_profile(signed).digest != profile.digest


def test_failed_signing_keeps_the_old_signature(signed: Path, keys: Keys) -> None:
    class Half:
        def sign(self, file: Path, signature: Path) -> None:
            assert file.stat().st_mode & 0o77 == 0 or file.parent.stat().st_mode & 0o77 == 0
            signature.write_bytes(b"{")

    before = signature_path(signed).read_bytes()
    with pytest.raises(SignatureError, match="must be JSON"):
        sign_profile(signed, Half())
    assert signature_path(signed).read_bytes() == before
    assert sorted(path.name for path in signed.parent.glob("*profile*")) == ["profile.json", "profile.json.sig"]
    assert verify_profile(signed, SignerIdentity.parse(f"key:{keys()[1]}"))


def test_folder_that_cannot_be_written_is_refused(file: Path, keys: Keys) -> None:
    signature_path(file).mkdir()
    with pytest.raises(SignatureError, match=r"profile.json.sig cannot be written \(Is a directory\)"):
        sign_profile(file, Signer(keys()[0]))
    assert "the signature cannot be read (Is a directory)" in why(file, f"key:{keys()[1]}")


def test_missing_library_is_named(signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("model_signing", "OpenSSL", "cryptography"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)
            assert "pip install 'kvtuner[sign]'" in why(signed, f"key:{keys()[1]}")
            with pytest.raises(SignatureError, match=r"pip install 'kvtuner\[sign\]'"):
                sign_profile(signed, Signer(keys()[0]))


@pytest.mark.parametrize(
    "text", ["key:a.pem", "chain:root.pem", "chain:root.pem,more.pem", "sigstore:me@example.org,https://issuer.org"]
)
def test_identity_is_written_as_it_is_read(text: str) -> None:
    assert str(SignerIdentity.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "key", "key:", "key: ", "key:a,b", "key:a\0b", "KEY:a", "a.pem", "gpg:me", "chain:", "chain:a,,b"),
        *("sigstore:me@example.org", "sigstore:me@example.org,accounts.google.com", "sigstore:,https://x"),
        "sigstore:a,b,c",
    ],
)
def test_other_texts_are_no_identity(text: str) -> None:
    with pytest.raises(SignatureError, match=r"an identity is key:PUBLIC.pem, chain:ROOT.pem\[,MORE.pem\] or"):
        SignerIdentity.parse(text)
