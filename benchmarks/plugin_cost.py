"""Times SGLang's `load_plugins()` with and without the installed plugin, in processes that serve no profile.

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
    """The milliseconds of `load_plugins()` in one process that may load these plugins."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("KVTUNER_")}
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**variables, "SGLANG_PLUGINS": plugins},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return 1000 * float(output.split("SECONDS ")[1])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    pairs = [(milliseconds("kvtuner"), milliseconds("none of them")) for _ in range(repeats)]
    for name, times in zip(("with the plugin", "without"), zip(*pairs, strict=True), strict=True):
        print(f"{name}: median {statistics.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})")


if __name__ == "__main__":
    main()
