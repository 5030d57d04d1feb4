"""The profile as a file: its schema, digest, evaluation and how it is read when it may be hostile."""
