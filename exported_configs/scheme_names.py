"""The names of the cache schemes that every model has. Imports nothing, since the command line starts with it."""

from typing import Final

REFERENCE: Final = "bf16"
"""The unquantized cache, whatever the model's dtype."""
FP8: Final = "fp8"
"""SGLang's own cache of 8 bits."""
