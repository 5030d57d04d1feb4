"""The demo model and its corpus, which `tools/` makes, and its tasks. Knows nothing of quantization.

Other packages use `tasks` (`addition_lines`, `recall_problem`); `outliers` is a program.
"""
