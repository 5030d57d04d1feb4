"""The stages strung together: a search, a calibration, an evaluation, a benchmark.

`search` (which calibrates too), `evaluate` and `benchmark` each stand in the module of their name and take frozen
options; see `options` and `eval_bench_options`, and `flags` for what their fields are. `python_interface` has the same
for notebooks. `profile_lookup` and `published_files` find, import and publish profiles. Nothing here knows of command
lines, and all progress goes through `progress.say`.
"""
