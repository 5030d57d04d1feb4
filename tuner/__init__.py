"""Picks the configuration of least KL inside a budget, exactly by predicted scores and by measuring. Knows no models.

Other packages use `exact_solver` (`solve`, `solve_front`, `nested`), `study` (`refine`, `StudyResult`), `objective`
(`MeasuredKL`), `warm_starts` and `samplers.SamplerName`.
"""
