"""The stages of a search: its run, its targets, the winner of each, the comparison, the profile, the report's data.

Private to `kvtuner.pipeline`: `search`, `calibrate` and `dry_run` call them. Knows nothing of flags or of pages.
"""
