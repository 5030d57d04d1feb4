"""Attention over packed rows on a processor, in C++ that is of the wheel or compiled at first use.

The backend is `native_attention` (`NativeAttention`), and `library` (`load_library`) finds or compiles its library.
Latents are read in plain torch, by `latent_attention` (`LatentAttention`).
"""

from __future__ import annotations

from typing import Final

BACKEND: Final = "cpu"
"""The name of this backend."""
