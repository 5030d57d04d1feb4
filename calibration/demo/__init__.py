"""The demo model, its corpus, and the programs that make both. Knows nothing of quantization.

Other packages use `tasks` (`addition_lines`, `recall_problem`), benchmarks also `outliers` (`make_twin`). `train` and
`make_corpus` are programs that nothing imports.
"""
