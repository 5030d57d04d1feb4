"""The sections of `benchmarks/gpu.py`; `pools`, `speed` and `baselines` also serve the other programs of kernels."""
