"""Attention over packed rows in SGLang: ours on the metadata of its backends, and what its own kernels are given."""
