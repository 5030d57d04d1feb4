"""Turns measured sensitivities into the candidates of a search. Knows nothing of how it chooses."""
