"""The profile file: format, digest, validation, sharing. Knows nothing of how it was found or is served."""
