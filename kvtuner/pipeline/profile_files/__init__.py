"""Files of profiles: a list of those at hand, their publication, and the import of other tools' files.

Commands use `listing` (`list_profiles`), `publication` (`published_files`, `preview_text`, `upload_facts`,
`copy_fetched`) and `foreign_profile` (`import_profile`). Nothing here runs a model.
"""
