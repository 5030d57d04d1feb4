"""Layer-wise mixed-precision KV cache: searched offline, loaded at serving time."""

__version__ = "0.1.0"
