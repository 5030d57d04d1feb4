"""Detached OpenSSF signatures of profiles.

Other packages use `signatures` (`sign_profile`, `verify_profile`, `SignerIdentity`), `signers` (`Signer`) and
`signature_bundle` (`read_bundle`).
"""
