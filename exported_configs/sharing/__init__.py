"""References to profiles, the catalogue, the local store and the hub. Knows nothing of what a profile stores.

Other packages use `reference` (`parse_reference`, `find_profile`), `catalogue` (`choose`, `load_index`), `pull`
(`pull`), `push` (`plan_upload`, `push`), `card` (`card`) and `profile_store` (`all_stored`).
"""
