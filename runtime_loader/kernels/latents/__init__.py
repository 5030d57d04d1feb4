"""Triton kernels over packed latents (MLA), and their launches: `launch_latents`. No server uses them yet."""
