"""Turns measured sensitivities into the choices of a search. Knows nothing of how a search picks among them.

Other packages use `space` (`SearchSpace`, `LayerChoice`, `build_space`), `budget` (`Budget`, `Constraint`) and
`layer_notation`.
"""
