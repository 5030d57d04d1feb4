"""Detached signatures of profiles by OpenSSF model signing: who vouches for a file. Knows nothing of keys.

``profile.json.sig`` stands beside ``profile.json`` and covers its bytes, and by the hash in them those of a side file
with constants, which is read with it. The library is asked about a private copy of
bytes that were read once, and the profile is loaded from these: nobody can change the file between the two.
"""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kvtuner.errors import RunFolderError, SignatureError
from kvtuner.exported_configs.profile.field_types import MAX_PROFILE_BYTES
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.exported_configs.signing.signature_bundle import AGAIN, SIGNATURE, SIGNATURE_SUFFIX, Bundle, read_bundle
from kvtuner.exported_configs.signing.signer import (
    Signer,
    SignerIdentity,
    certificate_name,
    read_bounded,
    require_library,
)
from kvtuner.run_folder import write_atomically

_MEANS: Final[dict[str, str]] = {"key": "a key", "chain": "a certificate", "sigstore": "Sigstore"}


class Verified(NamedTuple):
    """The profile that a signature covers, which on the disk may be another by now, and the name of its maker."""

    signed_by: str
    profile: Profile


def signature_path(path: Path) -> Path:
    """The file of a profile's signature."""
    return path.with_name(path.name + SIGNATURE_SUFFIX)


def sign_profile(path: Path, signer: Signer) -> Path:
    """Sign a profile; returns the signature's file, beside the profile. One that is there is replaced.

    A file that is no profile is a `ProfileError`; what cannot be signed or written is a `SignatureError`.
    """
    if path.is_symlink():
        raise SignatureError(
            f"{path} is a link, and its signature would not stand beside the file; sign {path.resolve()}"
        )
    data = read_bounded(path, MAX_PROFILE_BYTES, "profile")
    load_profile(data, path)
    require_library()
    target = signature_path(path)
    try:
        with _private_copy(data, path.name) as (copy, signature):
            signer.sign(copy, signature)
            bundle = signature.read_bytes()
        _check_content(read_bundle(bundle), data, path)
        write_atomically(target, bundle)
    except (OSError, RunFolderError) as error:
        reason = getattr(error.__cause__ or error, "strerror", error)
        raise SignatureError(f"{target} cannot be written ({reason}); free or open its folder") from error
    return target


def verify_profile(path: Path, identity: SignerIdentity) -> Verified:
    """Check that a profile's signature is by `identity` and covers what the file holds.

    A `SignatureError` says why it is not; a file that is signed, and no profile, is a `ProfileError`.
    """
    data = read_bounded(path, MAX_PROFILE_BYTES, "profile")
    if_absent = "fetch it with the profile, or sign with kvtuner sign"
    signature = read_bounded(signature_path(path), SIGNATURE.max_bytes, "signature", if_absent=if_absent)
    try:
        bundle = read_bundle(signature)
        _check_content(bundle, data, path)
        if bundle.kind != identity.kind:
            raise SignatureError(
                f"it is signed with {_MEANS[bundle.kind]}, but one with {_MEANS[identity.kind]} was asked for:"
                f" {identity}; ask its publisher how it is signed"
            )
        require_library()
        with _private_copy(data, path.name) as (copy, copied_signature):
            copied_signature.write_bytes(signature)
            identity.verify(copy, copied_signature, bundle.certificate)
        return Verified(signed_by(bundle), load_profile(data, path))
    except SignatureError as error:
        raise SignatureError(f"{signature_path(path)}: {error}") from error
    except OSError as error:
        raise SignatureError(f"no private copy can be made ({error.strerror}); free the temporary folder") from error


def signed_by(bundle: Bundle) -> str:
    """The fingerprint of a key, or the name in a certificate: true only of a signature that was verified."""
    return f"key {bundle.key_hint}" if bundle.kind == "key" else certificate_name(bundle.certificate)


@contextmanager
def _private_copy(data: bytes, name: str) -> Iterator[tuple[Path, Path]]:
    """A file under its own name, which goes into the signature, and a path for the signature."""
    with tempfile.TemporaryDirectory(prefix="kvtuner-") as folder:
        copy = Path(folder, "content", name)
        copy.parent.mkdir(mode=0o700)
        copy.write_bytes(data)
        yield copy, Path(folder, "signature")


def _check_content(bundle: Bundle, data: bytes, path: Path) -> None:
    actual, signed, name = hashlib.sha256(data).hexdigest(), bundle.sha256, bundle.name
    if signed == actual:
        return
    hashes = f"the file has sha256 {actual[:12]}..., but {signed[:12]}... was signed"
    if name != path.name:
        raise SignatureError(f"it is the signature of another file, {name!a} ({hashes}); fetch this file's own")
    raise SignatureError(f"{path.name} was changed after it was signed: {hashes}; fetch both again, or {AGAIN}")
