"""Triton kernels over packed rows. This package alone imports triton; it knows nothing of servers.

`attention_backends` uses `triton_attention` (`TritonAttention`) and `pages.page_mover` (`TritonMover`), each when a
server chooses it. The rest is private; `benchmarks/` measures it.
"""

from typing import Final

NAME: Final = "triton"
"""The name of the attention backend, and of the page mover, that these kernels are."""
