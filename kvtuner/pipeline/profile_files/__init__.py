"""Files of profiles: those at hand, their publication, other tools' files, and the model that a profile is for.

Commands use `listing` (`list_profiles`), `publication` (`published_files`, `preview_text`, `upload_facts`,
`copy_fetched`), `foreign_profile` (`import_profile`) and `model_fit` (`warn_of_mismatches`, `model_mismatches`).
Nothing here runs a model.
"""
