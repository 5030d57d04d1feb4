"""Detached OpenSSF signatures of profiles.

Other packages use `signatures` (`sign_profile`, `verify_profile`, `load_verified`, `SignerIdentity`), `signers`
(`Signer`) and `signature_bundle` (`read_bundle`).
"""
