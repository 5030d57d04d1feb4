"""Triton kernels over packed rows. This package alone imports triton; it knows nothing of servers."""

from typing import Final

NAME: Final = "triton"
"""The name of the attention backend, and of the page mover, that these kernels are."""
