"""The stages strung together: a search, a calibration, an evaluation, a benchmark.

`search`, `calibrate`, `evaluate` and `benchmark` each stand in the module of their name and take frozen options; see
`options`, `evaluation_options` and `bench_options`. `python_interface` has the same for notebooks. Nothing here knows
of command lines, and all progress goes through `progress.say`.
"""
