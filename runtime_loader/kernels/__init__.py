"""Triton kernels over packed rows. Alone in importing triton; knows nothing of servers."""
