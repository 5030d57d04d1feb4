"""``kvtuner serve-local``: the local engine behind OpenAI's interface."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvtuner.cli.command import Command, add_options
from kvtuner.pipeline.flags.option_fields import options_from
from kvtuner.pipeline.local.engine_flags import ServeFlags
from kvtuner.pipeline.progress import say, say_loading

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def _run(args: Namespace) -> int:
    flags = options_from(ServeFlags, vars(args))
    say_loading()
    from kvtuner.pipeline.local.served_engine import serve_engine

    def ready(facts: dict[str, Any]) -> None:
        if args.json:
            print(json.dumps(facts), flush=True)
        say(
            f"{facts['model']} answers at {facts['url']}/v1; attention by {facts['attention']},"
            f" {facts['kv_bytes_per_token']} bytes of KV per token, room for {facts['kv_tokens']:,} tokens"
        )

    try:
        serve_engine(flags, ready)
    except KeyboardInterrupt:
        say("ended")
    return 0


def _add_flags(parser: ArgumentParser) -> None:
    add_options(parser, ServeFlags)


COMMANDS: Final = (
    Command("serve-local", "serve a model by OpenAI's interface, with a profile and without SGLang", _add_flags, _run),
)
