"""Run by test_named_profiles.py in a process of its own: what a launcher's flags come to, as JSON, without a server.

`python named_program.py MODEL FLAG...`: `ServerArgs` are parsed and resolved, and one more process is asked what it
would serve, as a scheduler is started.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import sglang.srt.plugins
from sglang.srt.server_args import ServerArgs

CHILD = """
import json, sys
import sglang.srt.plugins
sglang.srt.plugins.load_plugins()
from kvtuner.runtime_loader.sglang.process_state import process_state
active = process_state().active()
print(json.dumps({"digest": active.loaded and active.loaded.digest, "profile": active.request.profile}))
"""

model, *flags = sys.argv[1:]
sglang.srt.plugins.load_plugins()
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
server_args = ServerArgs.from_cli_args(
    parser.parse_args(["--model-path", model, "--device", "cpu", "--dtype", "float32", *flags])
)
server_args.resolve_once()

from kvtuner.runtime_loader.sglang.process_state import process_state  # noqa: E402  # as SGLang does: its plugins come first

child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
sys.stdout.write(
    json.dumps(
        {
            "checked": process_state().checked_digest,
            "profile": process_state().active().request.profile,
            "variables": {name: os.environ.get(name) for name in ("KVTUNER_PROFILE", "KVTUNER_SERVING")},
            "child": child.stdout,
            "child_said": child.stderr[-2000:],
        }
    )
)
