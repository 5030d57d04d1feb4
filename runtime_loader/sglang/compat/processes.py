"""SGLang's processes: flags, resolved arguments, and a scheduler that says what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sglang.srt.plugins.hook_registry import HookRegistry

from kvtuner.runtime_loader.sglang.compat.hooks import AFTER, AROUND, install, is_applied

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

_CONTROLLER: Final = "sglang.srt.managers.data_parallel_controller.DataParallelController"
_SERVER_ARGS: Final = "sglang.srt.server_args.ServerArgs"


def on_flags(add: Callable[[ArgumentParser], None], parsed: Callable[[Namespace], None]) -> None:
    """Call `add` with the launcher's parser, and `parsed` with what it read, before anything is resolved."""

    def add_cli_args(_: object, parser: ArgumentParser) -> None:
        # Where the other hook was lost, the parser must refuse the flags: nothing would come of them.
        if is_applied(f"{_SERVER_ARGS}.from_cli_args", from_cli_args):
            add(parser)

    def from_cli_args(original: Callable[..., Any], cls: type, args: Namespace) -> Any:
        parsed(args)
        return original(cls, args)

    # Registered only: SGLang applies them with those of other plugins, which may share these functions.
    HookRegistry.register(f"{_SERVER_ARGS}.add_cli_args", add_cli_args, AFTER)
    HookRegistry.register(f"{_SERVER_ARGS}.from_cli_args", from_cli_args, AROUND)


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
    """Return the arguments as decided so far; one that this SGLang does not have is an AttributeError."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def decide(server_args: Any, **fields: Any) -> None:
    """Decide arguments during resolution."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, "kvtuner", **fields)


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


def on_scheduler(start: Callable[[Any], None], of_replicas: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
    """Call `start` with the resolved arguments in every scheduler process, before it builds anything.

    Where there are replicas of data parallelism, what their controller says of itself to the launcher gets what
    `of_replicas` makes of the schedulers' own words, which SGLang leaves out.
    """

    def publish(_: object, server_args: Any, *, role: str, **__: Any) -> None:
        if role == "scheduler":
            start(server_args)
        elif role == "dp_controller":
            install(f"{_CONTROLLER}.get_init_info", get_init_info, AFTER)

    def get_init_info(result: dict[str, Any], self: Any) -> dict[str, Any]:
        return {**result, **of_replicas(list(self._scheduler_init_infos))}

    install("sglang.srt.runtime_context.publish", publish, AFTER, "server_args", "role")


def on_beam_search(refusal: Callable[[], str | None]) -> None:
    """Answer requests for beam search with what `refusal` says, as with SGLang's own refusals; None lets them pass."""

    def validate(original: Callable[..., str | None], self: Any, req: Any, recv_req: Any) -> str | None:
        return refusal() or original(self, req, recv_req)

    install("sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init", validate, AROUND, "req", "recv_req")
