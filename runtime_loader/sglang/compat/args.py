"""SGLang's arguments: flags, resolution, and what was resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookType

from kvtuner.runtime_loader.sglang.compat.hooks import is_applied, share

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"


def on_flags(add: Callable[[ArgumentParser], None], parsed: Callable[[Namespace], None]) -> None:
    """Call `add` with the launcher's parser, and `parsed` with what it read, before anything is resolved."""

    def add_cli_args(_: object, parser: ArgumentParser) -> None:
        # Where the other hook was lost, the parser must refuse the flags: nothing would come of them.
        if is_applied(f"{_SERVER_ARGS}.from_cli_args", from_cli_args):
            add(parser)

    def from_cli_args(original: Callable[..., Any], cls: type, args: Namespace) -> Any:
        parsed(args)
        return original(cls, args)

    share(f"{_SERVER_ARGS}.add_cli_args", add_cli_args, HookType.AFTER)
    share(f"{_SERVER_ARGS}.from_cli_args", from_cli_args, HookType.AROUND)


def on_resolution(before_backend: Callable[[Any], None], at_end: Callable[[Any], None]) -> None:
    """Call functions of the arguments record before the attention backend is chosen, and when all is resolved."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    @register_resolution_hook("handle_attention_backend_compatibility")  # type: ignore[untyped-decorator]
    def backend(server_args: Any, previous: Callable[[Any], None]) -> None:
        before_backend(server_args)
        previous(server_args)

    @register_resolution_hook("handle_other_validations")  # type: ignore[untyped-decorator]
    def validate(server_args: Any, previous: Callable[[Any], None]) -> None:
        previous(server_args)
        at_end(server_args)


def resolved(server_args: Any) -> Any:
    """A view of the arguments as decided so far; raises AttributeError for one that this SGLang does not have."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def decide(server_args: Any, **fields: Any) -> None:
    """Decide arguments during resolution."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, "kvtuner", **fields)
