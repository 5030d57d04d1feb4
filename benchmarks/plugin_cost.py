"""What the installed plugin costs an SGLang process that serves no profile: the time of SGLang's `load_plugins()`.

    PYTHONPATH=examples/sglang_on_cpu python benchmarks/plugin_cost.py

Fresh processes that have imported SGLang's launcher load this plugin alone, and no plugin, in turn. The goal is at most
100 ms more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

PROGRAM = """
import time
import sglang.launch_server
from sglang.srt.plugins import load_plugins
start = time.perf_counter()
load_plugins()
print("SECONDS", time.perf_counter() - start)
"""


def milliseconds(plugins: str) -> float:
    """Of one process that may load these plugins."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("KVTUNER_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**variables, "SGLANG_PLUGINS": plugins},
        capture_output=True,
        text=True,
        check=True,
    )
    return 1000 * float(done.stdout.split("SECONDS ")[1])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    pairs = [(milliseconds("kvtuner"), milliseconds("none of them")) for _ in range(repeats)]
    for name, times in zip(("with the plugin", "without"), zip(*pairs, strict=True), strict=True):
        print(f"{name}: median {statistics.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})")


if __name__ == "__main__":
    main()
