"""Chooses bits per layer inside a budget: exactly, then by measured runs. Knows nothing of any server."""
