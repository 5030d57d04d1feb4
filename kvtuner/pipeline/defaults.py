"""What commands use where a flag is not given. Knows nothing of flags."""

from __future__ import annotations

from typing import Final

EVALUATION: Final = {
    "problems": 10,
    "questions": 4,
    "samples": 3,
    "batch_size": 1,
    "timeout": 120,
    "positions": 32,
    "scored_sequences": 8,
    "top_logprobs": 20,
}
"""Of an evaluation where nothing is said; one that nothing would read is refused, so known from none, too."""
