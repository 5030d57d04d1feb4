"""Hooks that are there or refused: SGLang itself logs a hook that fails and serves without it."""

from __future__ import annotations

import inspect
import pkgutil
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.sglang.process_state import process_state

if TYPE_CHECKING:
    from collections.abc import Callable

AROUND = HookType.AROUND
AFTER = HookType.AFTER


def install(target: str, hook: Callable[..., Any], kind: Any, *parameters: str) -> None:
    """Hook the function of a dotted path now, as `AROUND` or `AFTER` says, and leave other plugins' targets alone.

    A target that another plugin has, or that is gone or does not take these parameters, is a `ServingError`.
    """
    if HookRegistry._hooks.get(target) or target in HookRegistry._patched:
        raise _not_alone(target)
    check_named(target, *parameters)
    # Applied at once: SGLang applies hooks when all plugins are loaded, logs one that fails, and serves without it.
    HookRegistry.register(target, hook, kind)
    HookRegistry._apply_target(target, HookRegistry._hooks[target])
    HookRegistry._patched.add(target)
    process_state().targets[target] = hook
    if not is_applied(target, hook):
        raise ServingError(f"SGLang did not hook {target}; install a version that kvtuner is tested with")


def check_alone() -> None:
    """Refuse a plugin that was loaded later and wants a target that is ours: SGLang would leave its hook out."""
    for target, hook in process_state().targets.items():
        if len(HookRegistry._hooks[target]) > 1 or not is_applied(target, hook):
            raise _not_alone(target)


def _not_alone(target: str) -> ServingError:
    return ServingError(
        f"another SGLang plugin hooks {target}, which a packed KV pool needs for itself; leave that plugin out: set"
        " SGLANG_PLUGINS to kvtuner and, where there is one, your platform's plugin"
    )


def check_leading(target: str, *parameters: str) -> None:
    """Refuse a function, called or replaced by position, that is gone or does not begin with these parameters."""
    taken = _parameters(target)
    if taken[: len(parameters)] != parameters:
        raise ServingError(
            f"{target} of this SGLang takes ({', '.join(taken)}), not ({', '.join(parameters)}, ...); install a version"
            " that kvtuner is tested with"
        )


def check_named(target: str, *parameters: str) -> None:
    """Refuse a function that is gone or does not take these parameters, which are given by name."""
    taken = _parameters(target)
    missing = [name for name in parameters if name not in taken]
    if missing:
        raise ServingError(
            f"{target} of this SGLang does not take {missing[0]}; install a version that kvtuner is tested with"
        )


def _parameters(target: str) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(pkgutil.resolve_name(target)).parameters)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ServingError(
            f"this SGLang has no {target} ({error}); install a version that kvtuner is tested with"
        ) from error


def is_applied(target: str, hook: Callable[..., Any]) -> bool:
    """Whether there is a target, and a call of it reaches the hook."""
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    # SGLang's wrapper holds the hook in a closure; other wrappers may lie around it.
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
