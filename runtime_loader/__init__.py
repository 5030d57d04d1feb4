"""Serves a profile: resolves it for a model and rank, and runs caches in its precision. Knows no search."""
