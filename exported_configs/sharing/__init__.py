"""References to profiles, the catalogue, the local store and the hub.

Other packages use `reference` (`parse_reference`), `find` (`find_profile`, `find_profiles`), `catalogue` (`choose`,
`load_index`), `hub` (`pull`), `upload` (`plan_upload`, `push`) and `card` (`card`).
"""
