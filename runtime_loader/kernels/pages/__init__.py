"""Triton kernels that move pages between a device and pinned host memory; `page_mover` alone is used from outside."""
