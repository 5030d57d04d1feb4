"""Rows written by kernels, token by token, on grids that may be fitted, and their launches: `launch_store`."""
