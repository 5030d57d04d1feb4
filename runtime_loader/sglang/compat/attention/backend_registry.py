"""SGLang's registry of attention backends, whose makers ours replace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention import attention_registry

from kvtuner.errors import ServingError

if TYPE_CHECKING:
    from collections.abc import Callable


def build_by(name: str, make: Callable[[Any], Any | None]) -> None:
    """Let `make` build the backend of a name for a model runner, once; where it gives None, SGLang's own is built."""
    stock = attention_registry.ATTENTION_BACKENDS.get(name)
    if stock is None:
        raise ServingError(
            f"this SGLang has no attention backend {name}; install a version that kvtuner is tested with"
        )
    if getattr(stock, "is_kvtuner", False):
        return

    def create(runner: Any) -> Any:
        backend = make(runner)
        return stock(runner) if backend is None else backend

    create.is_kvtuner = True  # type: ignore[attr-defined]
    attention_registry.ATTENTION_BACKENDS[name] = create
