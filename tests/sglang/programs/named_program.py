"""Run by test_named_profiles.py in a process of its own: what a launcher's flags come to, as JSON, without a server.

`python named_program.py MODEL FLAG...`: `ServerArgs` are parsed and resolved, and one more process is asked what it
would serve, as a scheduler is started.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from typing import TYPE_CHECKING

import sglang.srt.plugins
from sglang.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def serve_nothing(answers: Connection) -> None:
    """Be the child: tell what a scheduler would serve."""
    sglang.srt.plugins.load_plugins()
    from kvtuner.runtime_loader.sglang.process_state import process_state

    active = process_state().active()
    digest = active.named_profile and active.named_profile.digest
    answers.send(json.dumps({"digest": digest, "profile": active.request.profile}))


def main(model: str, *flags: str) -> None:
    sglang.srt.plugins.load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    server_args = ServerArgs.from_cli_args(
        parser.parse_args(["--model-path", model, "--device", "cpu", "--dtype", "float32", *flags])
    )
    server_args.resolve_once()
    # As SGLang does: its plugins come first.
    from kvtuner.runtime_loader.sglang.process_state import process_state

    spawn = multiprocessing.get_context("spawn")
    answers, of_child = spawn.Pipe()
    child = spawn.Process(target=serve_nothing, args=(of_child,))
    child.start()
    of_child.close()
    result = {
        "checked": process_state().checked_digest,
        "profile": process_state().active().request.profile,
        "child": answers.recv(),
    }
    child.join()
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
