"""What the checks of kernels on a GPU share, and those of latents."""
