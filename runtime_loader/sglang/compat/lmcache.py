"""SGLang's prefix tree above LMCache: under which name its server keeps what is stored there."""

from __future__ import annotations

import copy
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.runtime_context import get_memory

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.compat.hooks import AROUND, install

if TYPE_CHECKING:
    from collections.abc import Callable

LMCACHE: Final = "0.5.6"
"""The release of LMCache that tests stored rows in."""


def check_lmcache() -> None:
    """Refuse a release of LMCache that no test stored rows in."""
    try:
        installed = version("lmcache")
    except PackageNotFoundError:
        raise ServingError(f"--enable-lmcache needs LMCache; pip install lmcache=={LMCACHE}") from None
    if installed != LMCACHE:
        raise ServingError(
            f"packed rows were stored in LMCache {LMCACHE}, but {installed} is installed; install that one, or drop"
            " --enable-lmcache"
        )


def on_lmcache(stored_as: Callable[[str], str]) -> None:
    """Let LMCache keep pages of a model under what `stored_as` makes of the model's name, which is all it compares."""

    def build(original: Callable[..., Any], ctx: Any) -> Any:
        if get_memory().enable_lmcache:
            model = copy.copy(ctx.model_config)
            model.model_path = stored_as(model.model_path)
            ctx = replace(ctx, model_config=model)
        return original(ctx)

    install("sglang.srt.mem_cache.registry.default_radix_cache_factory", build, AROUND, "ctx")
