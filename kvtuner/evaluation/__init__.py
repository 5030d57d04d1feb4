"""Measures and reports what a profile costs in quality. Knows nothing of how it was found."""
