"""The names of the cache schemes that are no pair of bits. Imports nothing, since the command line starts with it."""

from typing import Final

REFERENCE: Final = "bf16"
"""The unquantized cache, whatever the model's dtype."""
FP8: Final = "fp8"
"""SGLang's own cache of 8 bits."""
BEST_UNIFORM: Final = "best-uniform"
"""The best uniform of a profile's search, with its transforms, grids and window, as a user asks for it."""
