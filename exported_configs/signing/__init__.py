"""Detached OpenSSF signatures of profiles.

Other packages use `signatures` (`sign_profile`, `verify_profile`, `load_verified`, `SignerIdentity`), `signers` (the
three kinds of signer) and `signature_bundle` (`read_bundle`).
"""
