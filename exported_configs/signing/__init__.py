"""Detached OpenSSF signatures of profiles.

Other packages use `profile_signature` (`sign_profile`, `verify_profile`), `signer` (`Signer`, `SignerIdentity`)
and `signature_bundle` (`read_bundle`).
"""
