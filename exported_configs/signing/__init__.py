"""Detached OpenSSF signatures of profiles.

Other packages use `profile_signature` (`sign_profile`, `verify_profile`, `SignerIdentity`), `file_signature` (`Signer`)
and `signature_bundle` (`read_bundle`).
"""
