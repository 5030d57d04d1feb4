"""Files of profiles: those at hand, their publication, other tools' files, and the model that a profile is for.

Commands use `lookup` (`profile_of`, `profiles_of`, `list_profiles`, `model_mismatches`), `publication`
(`published_files`, `preview_text`, `upload_facts`, `copy_fetched`) and `foreign_profile` (`import_profile`).
Nothing here runs a model.
"""
