"""SGLang's processes: a scheduler begins, says what it is, and its launcher hears it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtuner.runtime_loader.sglang.compat.hooks import AFTER, install

if TYPE_CHECKING:
    from collections.abc import Callable


def on_ready(check: Callable[[list[dict[str, Any]]], None]) -> None:
    """Call `check` in the launcher with what its schedulers say of themselves, before anything is served."""

    def ready(result: list[dict[str, Any]], *_: Any, **__: Any) -> None:
        check(result)

    install("sglang.srt.entrypoints.engine._wait_for_scheduler_ready", ready, AFTER)


def on_introduction(say: Callable[[], dict[str, str]]) -> None:
    """Add to what a scheduler says of itself to its launcher."""

    def get_init_info(result: dict[str, Any], _: Any) -> dict[str, Any]:
        return {**result, **say()}

    install("sglang.srt.managers.scheduler.Scheduler.get_init_info", get_init_info, AFTER)


def on_scheduler(start: Callable[[Any], None]) -> None:
    """Call `start` with the resolved arguments in every scheduler process, before it builds anything."""

    def publish(_: object, server_args: Any, *, role: str, **__: Any) -> None:
        if role == "scheduler":
            start(server_args)

    install("sglang.srt.runtime_context.publish", publish, AFTER, "server_args", "role")
