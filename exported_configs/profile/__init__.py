"""The profile as a file: its schema, its digest, its evaluations, and its reading where it may be hostile.

Other packages use `profile` (`Profile`), `load` (`load_profile`), `build` (`build_profile`, `uniform_profile`,
`dump_profile`), `records` and `evaluation_record` (the records of measurements), and `document` (hostile JSON).
"""
