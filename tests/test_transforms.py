"""The table of transforms, and a new one that needs nothing but a row and a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtuner.errors import PrecisionError
from kvtuner.quant import STEPS
from kvtuner.transforms import TRANSFORMS, TransformKind, candidate_transforms, transform_names

PROGRAM = Path(__file__).parent / "fixtures" / "new_transform_program.py"


def test_every_step_has_arithmetic_and_every_transform_a_letter_of_its_own() -> None:
    assert {step for kind in TRANSFORMS.values() for step in kind.steps} == STEPS.keys()
    letters = [kind.letter for kind in TRANSFORMS.values()]
    assert len(set(letters)) == len(letters)
    assert all(len(letter) == 1 for letter in letters)


def test_candidates_of_the_first_release_stand_in_the_order_that_breaks_ties() -> None:
    first = ("none", "hadamard", "balanced", "balanced+hadamard", "centered+balanced", "centered+balanced+hadamard")
    assert tuple(name for name in candidate_transforms("k") if name in first) == first
    assert candidate_transforms("v")[:2] == transform_names("v")[:2] == ("none", "hadamard")


@pytest.mark.parametrize(
    ("name", "has_values", "message"),
    [
        ("balanced", True, "balanced is not for values, which have no mu"),
        ("centered+hadamard", True, "centered.hadamard is not for values"),
        ("hadamard+centered", False, "only the first step can be centered"),
        ("centered+centered", False, "only the first step can be centered"),
    ],
)
def test_a_transform_that_readers_could_not_undo_is_refused_by_name(name: str, has_values: bool, message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        TransformKind(name, "?", has_values=has_values)


@pytest.mark.slow
def test_a_new_key_transform_is_measured_chosen_written_and_read() -> None:
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
