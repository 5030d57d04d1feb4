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
    """Hook one function now, and leave other plugins' targets alone.

    Args:
        target: The dotted path of the function.
        hook: The hook, which is called as `kind` says.
        kind: `AROUND` or `AFTER`.
        *parameters: The names of parameters that the target must take.

    Raises:
        ServingError: Another plugin has the target, it is gone, or it takes other arguments.
    """
    if HookRegistry._hooks.get(target) or target in HookRegistry._patched:
        raise _not_alone(target)
    taken = _parameters(target)
    missing = [name for name in parameters if name not in taken]
    if missing:
        raise ServingError(
            f"{target} of this SGLang does not take {missing[0]}; install a version that kvtuner is tested with"
        )
    HookRegistry.register(target, hook, kind)
    HookRegistry._apply_target(target, HookRegistry._hooks[target])
    HookRegistry._patched.add(target)
    process_state().targets[target] = hook
    if not is_applied(target, hook):
        raise ServingError(f"SGLang did not hook {target}; install a version that kvtuner is tested with")


def check_alone() -> None:
    """Check that no plugin that was loaded later wants a target that is ours: SGLang would leave its hook out.

    Raises:
        ServingError: names the target.
    """
    for target, hook in process_state().targets.items():
        if len(HookRegistry._hooks[target]) > 1 or not is_applied(target, hook):
            raise _not_alone(target)


def _not_alone(target: str) -> ServingError:
    return ServingError(
        f"another SGLang plugin hooks {target}, which a packed KV pool needs for itself; leave that plugin out: set"
        " SGLANG_PLUGINS to kvtuner and, where there is one, your platform's plugin"
    )


def check_leading(target: str, *parameters: str) -> None:
    """Check that a function, which is called or replaced by position, begins with these parameters.

    Raises:
        ServingError: it is gone, or begins otherwise.
    """
    taken = _parameters(target)
    if taken[: len(parameters)] != parameters:
        raise ServingError(
            f"{target} of this SGLang takes ({', '.join(taken)}), not ({', '.join(parameters)}, ...); install a version"
            " that kvtuner is tested with"
        )


def _parameters(target: str) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(pkgutil.resolve_name(target)).parameters)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ServingError(
            f"this SGLang has no {target} ({error}); install a version that kvtuner is tested with"
        ) from error


def share(target: str, hook: Callable[..., Any], kind: Any) -> None:
    """Register a hook that SGLang applies with those of other plugins, on a target that plugins may share."""
    HookRegistry.register(target, hook, kind)


def is_applied(target: str, hook: Callable[..., Any]) -> bool:
    """Whether there is a target, and a call of it reaches the hook."""
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
