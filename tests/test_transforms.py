"""The table of transforms, and a new one that needs nothing but a row and a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtuner.quant import STEPS
from kvtuner.transforms import TRANSFORMS, candidate_transforms, transform_names

PROGRAM = Path(__file__).parent / "fixtures" / "new_transform_program.py"


def test_every_step_has_arithmetic_and_every_transform_a_letter_of_its_own() -> None:
    assert {step for kind in TRANSFORMS.values() for step in kind.steps} == STEPS.keys()
    letters = [kind.letter for kind in TRANSFORMS.values()]
    assert len(set(letters)) == len(letters)
    assert all(len(letter) == 1 for letter in letters)


def test_candidates_stand_in_the_order_that_breaks_ties() -> None:
    assert candidate_transforms("k") == (
        "none",
        "hadamard",
        "balanced",
        "balanced+hadamard",
        "centered+balanced",
        "centered+balanced+hadamard",
    )
    assert candidate_transforms("v") == transform_names("v") == ("none", "hadamard")


@pytest.mark.slow
def test_a_new_key_transform_is_measured_chosen_written_and_read() -> None:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
