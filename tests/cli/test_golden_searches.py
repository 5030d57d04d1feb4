"""Six searches of the demo model whose profiles are known byte for byte: what a refactoring must not change."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from kvtuner.exported_configs.profile.load import load_profile

if TYPE_CHECKING:
    from fixture_types import RunCommand

pytestmark = pytest.mark.slow

GOLDEN: Final = Path(__file__).with_name("golden_searches.json")
"""The hashes of the profile files, the machine that made them, and what every layer stores."""
COMMON: Final = ("--model", "demo", "--sequence-length", "128", "--sequences", "2,2,4", "--no-report")
FIRST_EDITION: Final = ("--fit", "minmax", "--no-three-bits", "--word-bits", "32", "--residual-length", "0")
"""What a search without flags measured before grids were fitted; its profiles are of the first version."""
SEARCHES: Final[dict[str, tuple[str, ...]]] = {
    "as-a-user": ("--budget", "3bit", "--trials", "24"),
    "refined": (*FIRST_EDITION, "--budget", "3.5bit", "--seed", "3", "--trials", "24"),
    "groups": (
        *("--budget", "4.5bpe", "--score", "fisher", "--sampler", "tpe", "--trials", "24"),
        *("--groups", "--keep", "0:K8V8", "--k-group-size", "32", *FIRST_EDITION),
    ),
    "nested": (
        *("--budget", "2.5bit", "4bit", "6bit", "--nested", "--sampler", "none"),
        *("--symmetric", "--tp-size", "2", "--read-plan", "hit", *FIRST_EDITION),
    ),
    "fitted": (
        *("--budget", "3bit", "--score", "fisher", "--trials", "24"),
        *(*FIRST_EDITION, "--fit", "least_squares"),
    ),
    "hand-written": (
        *("--layers", "0-1:bf16,2-8:K4V2", "--score", "e_o", "--pairs"),
        *("--pp-size", "3", "--read-plan", "cache", *FIRST_EDITION),
    ),
}


def machine() -> str:
    """Everything that float32 sums may depend on besides the code: the processor and the release of torch."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model} {torch.backends.cpu.get_cpu_capability()} torch {torch.__version__}"


def facts_of(file: Path) -> dict[str, Any]:
    profile = load_profile(file)
    layers = [
        " ".join([str(pair), profile.transform_name(layer, "k"), profile.transform_name(layer, "v")])
        for layer, pair in enumerate(profile.pairs)
    ]
    return {
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "bytes_per_token": profile.bytes_per_token(),
        "layers": layers,
    }


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_gives_the_profile_that_it_gave_before(name: str, run: RunCommand, tmp_path: Path) -> None:
    status, _, stderr = run("search", *COMMON, *SEARCHES[name], "--out", tmp_path)
    assert status == 0, stderr
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    profiles = {file.name: facts_of(file) for file in sorted(tmp_path.glob("profile*.json"))}
    if machine() != golden["machine"]:  # another order of sums may move a constant's last bit, and so the bytes
        for facts in (*profiles.values(), *golden["files"][name].values()):
            facts.pop("sha256")
    assert profiles == golden["files"][name]
