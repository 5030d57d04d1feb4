"""Signatures by certificates: a real authority with an authority below it, and everybody who is not below it."""

from __future__ import annotations

import base64
import datetime
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import signature_checks
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvtuner.errors import SignatureError
from kvtuner.exported_configs.signing.profile_signature import (
    sign_profile,
    signature_path,
    verify_profile,
)
from kvtuner.exported_configs.signing.signer import Signer, SignerIdentity

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import MakeKeys

    from kvtuner.exported_configs.profile.profile import Profile


NOW = datetime.datetime.now(datetime.UTC)
USES = dict.fromkeys(
    ("content_commitment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"), False
)


@dataclass
class Holder:
    """A key with its certificate, and their files."""

    key: Any
    certificate: x509.Certificate
    key_file: Path
    certificate_file: Path


def certify(
    folder: Path,
    name: str,
    issuer: Holder | None = None,
    *,
    is_authority: bool = False,
    digital_signature: bool = True,
    days: tuple[int, int] = (-1, 1),
    key: Any = None,
    extensions: tuple[x509.ExtensionType, ...] = (),
) -> Holder:
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(
        digital_signature,
        key_encipherment=not digital_signature,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        **USES,
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + datetime.timedelta(days=days[0]))
        .not_valid_after(NOW + datetime.timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        .add_extension(usage, critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    certificate = builder.sign(key if issuer is None else issuer.key, hashes.SHA256())
    key_file, file = folder / f"{name}.key.pem", folder / f"{name}.pem"
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    file.write_bytes(certificate.public_bytes(Encoding.PEM))
    return Holder(key, certificate, key_file, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "certificates"
    path.mkdir()
    return path


@pytest.fixture
def root(folder: Path) -> Holder:
    return certify(folder, "root", is_authority=True)


@pytest.fixture
def middle(folder: Path, root: Holder) -> Holder:
    return certify(folder, "middle", root, is_authority=True)


def sign(file: Path, signer: Holder, *above: Holder) -> None:
    chain = tuple(holder.certificate_file for holder in above)
    sign_profile(file, Signer(signer.key_file, certificate=signer.certificate_file, chain=chain))


def why(file: Path, *trusted: Holder) -> str:
    return signature_checks.why(file, trust(*trusted))


def trust(*holders: Holder) -> SignerIdentity:
    return SignerIdentity.parse(f"chain:{','.join(str(holder.certificate_file) for holder in holders)}")


def put_certificate(file: Path, holder: Holder) -> None:
    """Put another certificate in the place of the signer's."""
    der = base64.b64encode(holder.certificate.public_bytes(Encoding.DER)).decode()
    signature_checks.edit(
        file,
        lambda bundle: bundle["verificationMaterial"]["x509CertificateChain"]["certificates"][0].update(rawBytes=der),
    )


def test_signer_below_a_trusted_root_is_good(
    file: Path, folder: Path, root: Holder, middle: Holder, profile: Profile
) -> None:
    signer = certify(folder, "signer", middle)
    sign(file, signer, middle, root)
    for identity in (trust(root), trust(root, middle), trust(middle, root)):
        verified = verify_profile(file, identity)
        assert (verified.profile, verified.signed_by) == (profile, "CN=signer")


def test_signer_below_another_root_of_the_same_name_is_refused(
    file: Path, folder: Path, tmp_path: Path, root: Holder
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    impostor = certify(elsewhere, "root", is_authority=True)
    signer = certify(elsewhere, "signer", impostor)
    sign(file, signer, impostor)
    assert "it is not by chain:" in why(file, root)
    assert verify_profile(file, trust(impostor))


def test_signer_whose_authority_is_no_authority_is_refused(file: Path, folder: Path, root: Holder) -> None:
    person = certify(folder, "person", root)
    sign(file, certify(folder, "signer", person), person, root)
    assert "it is not by chain:" in why(file, root)


def test_missing_middle_is_refused_and_so_is_a_trusted_middle_alone(
    file: Path, folder: Path, root: Holder, middle: Holder
) -> None:
    signer = certify(folder, "signer", middle)
    sign(file, signer, root)
    assert "it is not by chain:" in why(file, root)
    assert verify_profile(file, trust(root, middle))
    sign(file, signer, middle)
    assert "it is not by chain:" in why(file, middle)


def test_changed_file_and_changed_certificates_are_refused(
    file: Path, folder: Path, root: Holder, middle: Holder
) -> None:
    signer, other = certify(folder, "signer", root), certify(folder, "other", root)
    sign(file, signer, root)
    pristine = signature_path(file).read_bytes()
    sign(file, other, root)
    stolen = json.loads(signature_path(file).read_bytes())["verificationMaterial"]
    bundle = json.loads(pristine)
    for material, words in (
        (stolen, "that key did not make it, so it is forged or damaged"),
        (
            {"x509CertificateChain": {"certificates": []}, "tlogEntries": []},
            "certificates: List should have at least 1 item",
        ),
        ({"x509CertificateChain": {"certificates": [{"rawBytes": "AAAA"}]}}, "it is not by chain:"),
        ({"x509CertificateChain": {"certificates": ["x"]}}, "certificates[0]: must be a valid dictionary"),
        ({"x509CertificateChain": {"certificates": [{"raw_bytes": ""}]}}, "rawBytes: the field is missing"),
    ):
        signature_path(file).write_text(json.dumps({**bundle, "verificationMaterial": material}))
        assert words in why(file, root)
    signature_path(file).write_bytes(pristine)
    assert verify_profile(file, trust(root))
    file.write_bytes(file.read_bytes() + b" ")
    assert "was changed after it was signed" in why(file, root)


def test_certificate_that_is_not_for_signing_is_refused(file: Path, folder: Path, root: Holder) -> None:
    from model_signing import signing

    encrypter = certify(folder, "encrypter", root, digital_signature=False)
    with pytest.raises(SignatureError, match="the certificate is not for signing"):
        sign(file, encrypter, root)
    assert not signature_path(file).exists()
    signing.Config().use_certificate_signer(  # as somebody else might
        private_key=encrypter.key_file,
        signing_certificate=encrypter.certificate_file,
        certificate_chain=[root.certificate_file],
    ).sign(file, signature_path(file))
    assert "the certificate is not for signing" in why(file, root)
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING])
    sign(file, certify(folder, "coder", root, digital_signature=False, extensions=(uses,)), root)
    assert verify_profile(file, trust(root))


def test_certificate_with_another_kind_of_key_is_refused(file: Path, folder: Path, root: Holder) -> None:
    odd = certify(folder, "odd", root, key=rsa.generate_private_key(65537, 1024))
    with pytest.raises(SignatureError, match=r"odd.key.pem cannot sign: .*; give the key of .*odd.pem, of P-256, P-"):
        sign(file, odd, root)
    sign(file, certify(folder, "signer", root), root)
    put_certificate(file, odd)
    assert "it is not by chain:" in why(file, root)


def test_certificate_with_an_extension_that_cannot_be_read_is_refused(file: Path, folder: Path, root: Holder) -> None:
    junk = x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, b"junk")
    broken, signer = certify(folder, "broken", root, extensions=(junk,)), certify(folder, "signer", root)
    with pytest.raises(SignatureError, match=r"broken.key.pem cannot sign: .*; give the key of .*broken.pem"):
        sign(file, broken, root)
    sign(file, signer, root)
    put_certificate(file, broken)
    assert "it is not by chain:" in why(file, root)


def test_certificate_counts_on_the_day_it_began(file: Path, folder: Path) -> None:
    """The library decides, as docs/sharing.md says: an expired signer is good, one older than its root not."""
    old = certify(folder, "old", is_authority=True, days=(-400, 400))
    sign(file, certify(folder, "expired", old, days=(-300, -200)), old)
    assert verify_profile(file, trust(old)).signed_by == "CN=expired"
    sign(file, certify(folder, "early", old, days=(-500, 400)), old)
    assert "certificate is not yet valid" in why(file, old)


def test_who_signed_is_named_by_mail_address_where_the_certificate_has_one(
    file: Path, folder: Path, root: Holder
) -> None:
    names = x509.SubjectAlternativeName([x509.RFC822Name("me@example.org")])
    sign(file, certify(folder, "signer", root, extensions=(names,)), root)
    assert verify_profile(file, trust(root)).signed_by == "me@example.org"


def test_kinds_of_signature_are_told_apart(file: Path, folder: Path, root: Holder, keys: MakeKeys) -> None:
    sign(file, certify(folder, "signer", root), root)
    with pytest.raises(SignatureError, match="signed with a certificate, but one with a key was asked for: key:"):
        verify_profile(file, SignerIdentity.parse(f"key:{keys()[1]}"))
    with pytest.raises(SignatureError, match="signed with a certificate, but one with Sigstore was asked for"):
        verify_profile(file, SignerIdentity.parse("sigstore:me@example.org,https://issuer.example.org"))


def test_files_that_do_not_fit_are_refused(file: Path, folder: Path, root: Holder, keys: MakeKeys) -> None:
    signer, other = certify(folder, "signer", root), certify(folder, "other", root)
    key_file, certificate, chain = signer.key_file, signer.certificate_file, (root.certificate_file,)
    for wrong, words in (
        (
            Signer(other.key_file, certificate=certificate, chain=chain),
            "other.key.pem cannot sign: .* does not match .*; give the key of .*signer.pem",
        ),
        (Signer(key_file, certificate=key_file, chain=chain), "cannot sign: .*PEM"),
        (
            Signer(key_file, certificate=certificate, chain=()),
            "a certificate needs those above it: add --certificate-chain",
        ),
        (Signer(key_file, certificate=certificate, chain=(key_file,)), "cannot sign: .*PEM"),
        (Signer(keys("locked", password=b"x")[0], certificate=certificate, chain=chain), "private key is encrypted"),
    ):
        with pytest.raises(SignatureError, match=words):
            sign_profile(file, wrong)
        assert not signature_path(file).exists()
    sign(file, signer, root)
    for path, words in ((folder / "absent.pem", "there is no such PEM file"), (key_file, "it is not by chain:")):
        with pytest.raises(SignatureError, match=words):
            verify_profile(file, SignerIdentity.parse(f"chain:{path}"))
