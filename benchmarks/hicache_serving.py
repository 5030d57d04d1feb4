"""Times the first token of real servers of the demo model, by the place that holds the prompt's prefix.

`hicache.py --serve` runs it. Each kind of server is started twice, so that the second finds the first one's pages in
storage.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

from transformers import AutoConfig

from kvtuner.bench.server import running
from kvtuner.calibration.model_loading import DEMO_MODEL
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.exported_configs.profile.build import dump_profile, uniform_profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair

PREFIXES: Final = (512, 2048, 6144)
PLACES: Final = ("computed", "device", "host", "storage")
START_S: Final = 300
FLAGS: Final = (
    "--model-path", str(DEMO_MODEL), "--device", "cpu", "--dtype", "float32", "--disable-cuda-graph",
    "--max-total-tokens", "8192", "--max-running-requests", "2", "--mem-fraction-static", "0.5", "--page-size", "64",
    "--chunked-prefill-size", "-1", "--enable-hierarchical-cache", "--hicache-ratio", "16", "--enable-cache-report",
    "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete",
)  # fmt: skip


def first_tokens(repeats: int) -> list[dict[str, Any]]:
    """The median milliseconds until the first token, by server, length of the prefix and place of the prefix."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        write_profile(profile)
        for name, flags in (
            ("packed device pool", ("--kvtuner-profile", str(profile))),
            ("quantized below", ("--kvtuner-profile", str(profile), "--kvtuner-hicache-only")),
        ):
            rows += served(name, flags, Path(folder) / name.replace(" ", "-"), repeats)
    return rows


def write_profile(path: Path) -> None:
    """Write a profile of the demo model with K4V4 in every layer."""
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    identity = identity_of(config, id="demo", revision=None, dtype="float32")
    path.write_bytes(dump_profile(uniform_profile(ModelGeometry.from_config(config), PrecisionPair(4, 4), identity)))


def served(name: str, flags: tuple[str, ...], folder: Path, repeats: int) -> list[dict[str, Any]]:
    """The rows of one kind of server."""
    rng = random.Random(0)
    prompts = {size: [[rng.randrange(2, 300) for _ in range(size + 16)] for _ in range(repeats)] for size in PREFIXES}
    # Long enough together to push every other prompt off the device.
    churn = [[rng.randrange(2, 300) for _ in range(7000)] for _ in range(2)]
    times: dict[tuple[int, str], list[float]] = {}
    storage = json.dumps({"file_storage_path": str(folder), "prefetch_threshold": 64})
    for expected in (("computed", "device", "host"), ("storage",)):
        flags_here = (*FLAGS, "--hicache-storage-backend-config", storage, *flags)
        with running(flags_here, folder.with_suffix(".log"), START_S) as server:
            ask(server.url, churn[0][:64])
            for size in PREFIXES:
                for prompt in prompts[size]:
                    for place in expected:
                        if place == "host":
                            for other in churn:
                                ask(server.url, other)
                        seconds, actual = ask(server.url, prompt)
                        assert actual == place, (actual, place, size)
                        times.setdefault((size, place), []).append(seconds)
    return [
        {"way": name, "prefix": size, "from": place, "ms": round(1000 * statistics.median(seconds), 1)}
        for (size, place), seconds in times.items()
    ]


def ask(url: str, ids: list[int]) -> tuple[float, str]:
    """The seconds until one token, and the place that held most of the prompt."""
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        meta = json.load(answer)["meta_info"]
    seconds = time.perf_counter() - begin
    details = meta.get("cached_tokens_details") or {}
    tokens = {place: details.get(place, 0) for place in PLACES[1:]}
    place = max(tokens, key=lambda name: tokens[name])
    return seconds, place if tokens[place] > len(ids) // 2 else "computed"


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"\nmilliseconds to the first token{'':12}" + "".join(f"{place:>10}" for place in PLACES))
    for name in dict.fromkeys(row["way"] for row in rows):
        for size in PREFIXES:
            cells = {row["from"]: row["ms"] for row in rows if row["way"] == name and row["prefix"] == size}
            print(f"{name}, prefix {size:<16}".ljust(43) + "".join(f"{cells[place]:>10}" for place in PLACES))
