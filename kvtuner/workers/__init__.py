"""The processes that measure in one run folder: their names, what each has in hand, and work that is done once."""
