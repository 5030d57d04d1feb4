"""Every launch of a server, compiled for GPUs that are not there: types, alignment, shared memory, grids.

Triton's own path from a call to a driver runs, with a driver that checks (fake_gpu.py) in place of CUDA's.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtuner.precision import ALL_BITS
from kvtuner.runtime_loader.kernels import launch_settings

PROGRAM = Path(__file__).with_name("launch_program.py")
LAUNCHES = Path(launch_settings.__file__).with_name(launch_settings.TABLE)
ARCHITECTURES = [80, 89, 90, 100]
HEAD_DIMS = [64, 80, 96, 128, 256]
TRANSFORMS = "centered+balanced+hadamard"
CHOICES: dict[str, list[Any]] = {
    "head_dims": HEAD_DIMS, "kinds": ["none", TRANSFORMS], "heads": [[1, 7], [4, 1], [2, 4]], "groups": [1, 2, 4],
    "words": [32, 16], "fits": ["minmax", "least_squares"],
}  # fmt: skip
KERNELS = {
    "store_rows", "prepare_queries", "decode_split", "merge_splits", "attend_copies", "attend_fresh", "store_copies",
    "read_side", "read_joined", "copy_pages", "store_layers",
}  # fmt: skip
ONE: dict[str, Any] = {
    "archs": [90], "pairs": [[4, 2]], "head_dims": [128], "groups": [1], "heads": [[2, 4]], "kinds": [TRANSFORMS],
    "words": [32], "fits": ["minmax"],
}  # fmt: skip


def launched(limit_s: int = 900, **asked: Any) -> dict[str, Any]:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps({**ONE, **asked})],
        capture_output=True, text=True, timeout=limit_s, env=variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_ready(found: dict[str, Any], num_cases: int) -> set[str]:
    """Assert that each kernel that was launched was compiled for no batch of another size; return the kernels."""
    launched_kernels = set(found["launches"])
    assert launched_kernels == set(found["compiled"])
    assert len(found["cases"]) == num_cases
    assert [case for case in found["cases"] if case["anew"]] == []
    return launched_kernels


def has_settings(pair: tuple[int, ...], head_dim: int, groups: int) -> bool:
    """Return whether the table of settings has this format; servers refuse others by name."""
    asked = {"k_bits": pair[0], "v_bits": pair[1], "head_dim": head_dim, "groups": groups}
    table = json.loads(LAUNCHES.read_text())
    return any(asked.items() <= row.items() for row in table["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("arch", [*(pytest.param(arch, marks=pytest.mark.full) for arch in (80, 89)), 90, 100])
def test_all_kernels_are_launched_as_they_are_compiled(arch: int) -> None:
    assert assert_ready(launched(archs=[arch]), 1) == KERNELS


@pytest.mark.slow
@pytest.mark.parametrize("arch", [*(pytest.param(arch, marks=pytest.mark.full) for arch in (80, 89, 100)), 90])
def test_kernels_of_keys_per_channel_are_launched_as_they_are_compiled(arch: int) -> None:
    of_pages = {"copy_pages", "store_layers"}  # which refuse such keys
    pairs = [[2, 4]] if arch == 90 else [[2, 4], [3, 8], [8, 2]]
    found = launched(archs=[arch], kinds=["per_channel"], pairs=pairs, heads=[[2, 4]])
    assert assert_ready(found, len(pairs)) == {*KERNELS - of_pages - {"prepare_queries"}, "store_groups"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "bits"), [(90, 4), *(pytest.param(*case, marks=pytest.mark.full) for case in ((80, 2), (89, 8), (89, 16)))]
)
def test_kernels_of_latents_are_launched_as_they_are_compiled(arch: int, bits: int) -> None:
    asked = {"pairs": [[bits, 16]], "head_dims": [512], "groups": [2], "heads": [[1, 16]], "rotary_dim": 64}
    kernels = {*KERNELS - {"decode_split", "read_joined", "copy_pages", "store_layers"}, "decode_latents"}
    found = launched(archs=[arch], fits=["least_squares"], **asked)
    assert assert_ready(found, 1) == (kernels if bits < 16 else kernels - {"prepare_queries"})


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_pairs_of_an_architecture_with_other_properties_by_chance(arch: int) -> None:
    """Every pair in one of its formats, which a seed chooses: ten minutes of a core, where all formats take hours."""
    kernels: set[str] = set()
    for pair in itertools.product(ALL_BITS, repeat=2):
        chance = random.Random(f"{arch} {pair}")
        chosen: dict[str, Any] = {name: [chance.choice(choices)] for name, choices in CHOICES.items()}
        if not has_settings(pair, *chosen["head_dims"], *chosen["groups"]):
            chosen["groups"] = [1]
        kernels |= assert_ready(launched(archs=[arch], pairs=[list(pair)], **chosen), 1)
    assert kernels == KERNELS


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("pair", list(itertools.product(ALL_BITS, repeat=2)), ids=str)
def test_every_pair_and_head_dim(arch: int, pair: tuple[int, int]) -> None:
    asked = {"archs": [arch], "pairs": [list(pair)], "kinds": ["none", TRANSFORMS], "heads": [[1, 7], [4, 1]]}
    assert_ready(launched(7200, **asked, head_dims=HEAD_DIMS), 4 * len(HEAD_DIMS))


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("pair", [(4, 4), (3, 3), (2, 2), (4, 16), (16, 2)], ids=str)
def test_every_layout_of_scales_and_grid(arch: int, pair: tuple[int, int]) -> None:
    asked = {"archs": [arch], "pairs": [list(pair)], "groups": [1, 2, 4], "words": [16, 32]}
    assert_ready(launched(7200, **asked, fits=["minmax", "least_squares"]), 12)


FAULTS = {
    "types": ("SLOTS, PAGE = 96, 16", "SLOTS, PAGE = 96, 16\nfake_gpu.POINTED[torch.int64] = '*i32'", "as \\*i64"),
    "shared memory": ("asked = json", "fake_gpu.SHARED_KIB[90] = 1\nasked = json", "shared memory|out of resource"),
    "grid": ("asked = json", "fake_gpu.MOST_GRID = (4, 4, 1)\nasked = json", "has a grid of"),
    "alignment": (
        "dtype=torch.uint8), form)",
        "dtype=torch.uint8).as_strided((SLOTS - 1, form.row_bytes(DTYPE)), (form.row_bytes(DTYPE), 1), 8), form)",
        "not compiled for .*_ptr at a multiple of 16",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_launch_that_a_gpu_would_refuse_is_found(name: str, tmp_path: Path) -> None:
    found, put_in, message = FAULTS[name]
    text = PROGRAM.read_text()
    assert text.count(found) == 1
    program = tmp_path / "launch_program.py"
    program.write_text(text.replace(found, put_in))
    (tmp_path / "fake_gpu.py").write_text(PROGRAM.with_name("fake_gpu.py").read_text())
    variables = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(ONE)], capture_output=True, text=True, env=variables, timeout=600
    )
    assert done.returncode != 0
    assert re.search(message, done.stderr, re.IGNORECASE), done.stderr[-2000:]
