"""Detached signatures of profiles by OpenSSF model signing: who vouches for a file. Knows nothing of what it holds.

``profile.json.sig`` stands beside ``profile.json`` and covers its bytes. The library is asked about a private copy of
bytes that were read once, and the profile is loaded from these: nobody can change the file between the two.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner.errors import SignatureError
from kvtuner.exported_configs.profile.fields import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.signing import signers, signing_keys
from kvtuner.exported_configs.signing.signature_bundle import AGAIN, SIGNATURE, SUFFIX, Bundle, Kind, read_bundle

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.signing.signers import Signer

_HOW: Final = "an identity is key:PUBLIC.pem, chain:ROOT.pem[,MORE.pem] or sigstore:NAME,https://ISSUER"
_WITH: Final[dict[Kind, str]] = {"key": "a key", "chain": "a certificate", "sigstore": "Sigstore"}


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose signature is asked for.

    Attributes:
        kind: of the signature.
        paths: of a public key, or of certificates to trust; none for Sigstore.
        name: whom Sigstore knows: a mail address, or the address of a workflow.
        issuer: who vouched for that to Sigstore, such as ``https://accounts.google.com``.
    """

    kind: Kind
    paths: tuple[Path, ...] = ()
    name: str = ""
    issuer: str = ""

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Read ``key:PATH``, ``chain:PATH[,PATH]`` or ``sigstore:NAME,ISSUER``.

        Raises:
            SignatureError: other text.
        """
        kind, _, rest = text.partition(":")
        parts = rest.split(",")
        if "\0" not in text and all(part.strip() for part in parts):
            if kind == "key" and len(parts) == 1:
                return cls("key", (Path(rest).expanduser(),))
            if kind == "chain":
                return cls("chain", tuple(Path(part).expanduser() for part in parts))
            if kind == "sigstore" and len(parts) == 2 and parts[1].startswith("https://"):
                return cls("sigstore", name=parts[0], issuer=parts[1])
        raise SignatureError(f"{_HOW}, not {ascii(text)[:100]}")

    def __str__(self) -> str:
        said = (self.name, self.issuer) if self.kind == "sigstore" else map(str, self.paths)
        return f"{self.kind}:{','.join(said)}"


@dataclass(frozen=True, slots=True)
class Verified:
    """A file whose signature is that of who was asked for.

    Attributes:
        signed_by: a key's fingerprint, or whom the signer's certificate names.
        data: the bytes that the signature covers; what is on the disk may be others by now.
    """

    signed_by: str
    data: bytes = field(repr=False)


def signature_path(path: Path) -> Path:
    """Where a profile's signature stands."""
    return path.with_name(path.name + SUFFIX)


def sign_profile(path: Path, signer: Signer) -> Path:
    """Sign a profile; a signature that is there is replaced.

    Returns:
        The signature's file, beside the profile.

    Raises:
        ProfileError: the profile is none.
        SignatureError: it cannot be signed, or the signature cannot be written.
    """
    if path.is_symlink():
        raise SignatureError(
            f"{path} is a link, and its signature would not stand beside the file; sign {path.resolve()}"
        )
    data = _read(path, MAX_PROFILE_BYTES, "profile")
    load_profile(data, path)
    signers.require_library()
    target = signature_path(path)
    partial = path.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with tempfile.TemporaryDirectory(prefix="kvtuner-") as folder:
            copy = Path(folder) / path.name  # the name goes into the signature
            copy.write_bytes(data)
            signer.sign(copy, partial)
        _check_content(read_bundle(_read(partial, SIGNATURE.max_bytes, "signature")), data, path)
        partial.replace(target)
    except OSError as error:
        raise SignatureError(f"{target} cannot be written ({error.strerror}); free or open its folder") from error
    finally:
        partial.unlink(missing_ok=True)
    return target


def verify_profile(path: Path, identity: Identity) -> Verified:
    """Check that a profile's signature is that of `identity` and covers what the file holds.

    Raises:
        SignatureError: it does not; says in which way.
    """
    data = _read(path, MAX_PROFILE_BYTES, "profile")
    signature = _read(signature_path(path), SIGNATURE.max_bytes, "signature")
    try:
        bundle = read_bundle(signature)
        _check_content(bundle, data, path)
        if bundle.kind != identity.kind:
            raise SignatureError(
                f"it is signed with {_WITH[bundle.kind]}, but one with {_WITH[identity.kind]} was asked for:"
                f" {identity}; ask its publisher how it is signed"
            )
        _check_signature(path.name, data, signature, bundle, identity)
        return Verified(signed_by(bundle), data)
    except SignatureError as error:
        raise SignatureError(f"{signature_path(path)}: {error}") from error


def load_verified(path: Path, identity: Identity) -> Profile:
    """Read and check a profile from the very bytes that `verify_profile` found signed.

    Raises:
        SignatureError: it is not signed by `identity`.
        ProfileError: it is signed, and no profile.
    """
    return load_profile(verify_profile(path, identity).data, path)


def signed_by(bundle: Bundle) -> str:
    """Whom a signature names as its maker: true only of one that was verified."""
    if bundle.kind == "key":
        return f"key {bundle.key_hint}"
    return signing_keys.subject(signing_keys.leaf(bundle.certificates[0]))


def _check_content(bundle: Bundle, data: bytes, path: Path) -> None:
    found = hashlib.sha256(data).hexdigest()
    if bundle.sha256 == found:
        return
    told = f"the file has sha256 {found[:12]}..., but {bundle.sha256[:12]}... was signed"
    if bundle.name != path.name:
        raise SignatureError(f"it is the signature of another file, {bundle.name!a} ({told}); fetch this file's own")
    raise SignatureError(f"{path.name} was changed after it was signed: {told}; fetch both again, or {AGAIN}")


def _check_signature(name: str, data: bytes, signature: bytes, bundle: Bundle, identity: Identity) -> None:
    """Ask the library about private copies."""
    signers.require_library()
    try:
        with tempfile.TemporaryDirectory(prefix="kvtuner-") as folder:
            content = Path(folder) / "content"
            content.mkdir()
            file, copied_signature = content / name, Path(folder) / "signature"
            file.write_bytes(data)
            copied_signature.write_bytes(signature)
            if identity.kind == "key":
                signers.check_key(file, copied_signature, bundle, identity.paths[0])
            elif identity.kind == "chain":
                signers.check_chain(file, copied_signature, bundle, identity.paths)
            else:
                signers.check_sigstore(file, copied_signature, identity.name, identity.issuer)
    except OSError as error:
        raise SignatureError(f"no private copy can be made ({error.strerror}); free the temporary folder") from error


def _read(path: Path, max_bytes: int, what: str) -> bytes:
    try:
        with path.open("rb") as handle:
            data = handle.read(max_bytes + 1)
    except FileNotFoundError as error:
        way = "give its path" if what == "profile" else "fetch it with the profile, or sign with `kvtuner sign`"
        raise SignatureError(f"{path}: there is no such {what}; {way}") from error
    except OSError as error:
        raise SignatureError(f"{path}: the {what} cannot be read ({error.strerror}); give a file") from error
    if len(data) > max_bytes:
        raise SignatureError(f"{path}: a {what} has at most {max_bytes} bytes, but this is larger; fetch it again")
    return data
