"""The identity of a model in a profile, and its comparison with another model.

Other packages use `model_identity` (`identity_of`, `public_name`), `mismatch` (`compare_models`, `refuse`, `Policy`)
and `checkpoint_hash` (`checkpoint_sha256`).
"""
