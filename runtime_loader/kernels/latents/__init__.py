"""Packed latents (MLA) in Triton kernels: their launch in `launch_latents`, their attention in `triton_latents`."""
