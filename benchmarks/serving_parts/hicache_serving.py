"""Times the first token of real servers of the demo model, by the place that holds the prompt's prefix.

`hicache.py --serve` runs it. Each kind of server is started twice, so that the second finds the first one's pages in
storage.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from transformers import AutoConfig

from kvtuner.bench.server import run_server
from kvtuner.calibration.model_loading import DEMO_MODEL
from kvtuner.evaluation.backends.endpoint import Endpoint
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.exported_configs.profile.build import dump_profile, uniform_profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair
from kvtuner.report.table import Table

PREFIXES: Final = (512, 2048, 6144)
PLACES: Final = ("computed", "device", "host", "storage")
BEHIND: Final = 16
"""The tokens behind a prefix."""
START_S: Final = 300
ANSWER_S: Final = 600
FLAGS: Final = (
    "--model-path", str(DEMO_MODEL), "--device", "cpu", "--dtype", "float32", "--disable-cuda-graph",
    "--max-total-tokens", "8192", "--max-running-requests", "2", "--mem-fraction-static", "0.5", "--page-size", "64",
    "--chunked-prefill-size", "-1", "--enable-hierarchical-cache", "--hicache-ratio", "16", "--enable-cache-report",
    "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete",
)  # fmt: skip


def first_tokens(repeats: int) -> list[dict[str, Any]]:
    """The median milliseconds until the first token, by server, length of the prefix and place of the prefix."""
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    identity = identity_of(config, id="demo", revision=None, dtype="float32")
    uniform = uniform_profile(ModelGeometry.from_config(config), PrecisionPair(4, 4), identity)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        profile.write_bytes(dump_profile(uniform))
        for name, *flags in (("packed device pool",), ("quantized below", "--kvtuner-hicache-only")):
            flags = ["--kvtuner-profile", str(profile), *flags]
            rows += served(name, flags, Path(folder) / name.replace(" ", "-"), repeats)
    return rows


def served(name: str, flags: list[str], folder: Path, repeats: int) -> list[dict[str, Any]]:
    """The rows of one kind of server."""
    rng = random.Random(0)
    sizes = [size for size in PREFIXES for _ in range(repeats)]
    prompts = [[rng.randrange(2, 300) for _ in range(size + BEHIND)] for size in sizes]
    # Long enough together to push every other prompt off the device.
    churn = [[rng.randrange(2, 300) for _ in range(7000)] for _ in range(2)]
    times: dict[tuple[int, str], list[float]] = {}
    storage = json.dumps({"file_storage_path": str(folder), "prefetch_threshold": 64})
    for expected in (("computed", "device", "host"), ("storage",)):
        flags_here = (*FLAGS, "--hicache-storage-backend-config", storage, *flags)
        with run_server(flags_here, folder.with_suffix(".log"), START_S) as process:
            server = Endpoint(process.url, "sglang", ANSWER_S)
            ask(server, churn[0][:64])
            for prompt, place in itertools.product(prompts, expected):
                for other in churn if place == "host" else []:
                    ask(server, other)
                seconds, actual = ask(server, prompt)
                size = len(prompt) - BEHIND
                assert actual == place, (actual, place, size)
                times.setdefault((size, place), []).append(seconds)
    return [
        {"way": name, "prefix": size, "from": place, "ms": round(1000 * statistics.median(seconds), 1)}
        for (size, place), seconds in times.items()
    ]


def ask(server: Endpoint, ids: list[int]) -> tuple[float, str]:
    """The seconds until one token, and the place that held most of the prompt."""
    begin = time.perf_counter()
    meta = server.generate(ids, 1)["meta_info"]
    seconds = time.perf_counter() - begin
    details = meta.get("cached_tokens_details") or {}
    place = max(PLACES[1:], key=lambda name: details.get(name, 0))
    return seconds, place if details.get(place, 0) > len(ids) // 2 else "computed"


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(f"{row['way']}, prefix {row['prefix']}", {})[row["from"]] = str(row["ms"])
    table = [[name, *(by_place[place] for place in PLACES)] for name, by_place in cells.items()]
    print("\n" + "\n".join(Table(("milliseconds to the first token", *PLACES), table).lines()))
