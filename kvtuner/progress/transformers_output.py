"""What transformers says on its way, which a command that speaks for itself does not repeat. Knows no models."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Have transformers say errors alone, and draw no bars where stderr is no terminal."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
