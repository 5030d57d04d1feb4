"""Serves a profile: resolves it for a model and rank, and runs caches in its precision. Knows no search.

`KVTunerCache` is public here, imported when it is first used; `engine` is in `kvtuner.runtime_loader.sglang`.
Other packages also use `model_check` (`check_model`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtuner.runtime_loader.transformers_cache import KVTunerCache

__all__ = ["KVTunerCache"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtuner.runtime_loader.transformers_cache import KVTunerCache

    return KVTunerCache
