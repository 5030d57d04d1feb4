"""Every transform that keys and values may have before they are quantized, named once. Knows no arithmetic.

`quant.STEPS` has the arithmetic of each step. The schema of the profile, the candidates of calibration, the plan of a
dry run and the letters of a report all read this table. It stands below all of them: calibration, which measures the
candidates, may not import the search spaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kvtuner.errors import PrecisionError

if TYPE_CHECKING:
    from kvtuner.precision import Side

MIN_LAMBDA: Final = 1 / 64
MAX_LAMBDA: Final = 64.0
"""The bounds of lambda, far inside fp16, in which profiles store it."""


@dataclass(frozen=True, slots=True)
class TransformKind:
    """A transform without its constants: its steps joined by ``+``, or ``none``, and its letter in a strip of layers.

    Keys may have any transform, values some (`has_values`); calibration measures the candidates. What readers could not
    undo is a `PrecisionError`: they add q . mu in model space, and to sums of values they have no constants.
    """

    name: str
    letter: str
    has_values: bool = False
    is_candidate: bool = True

    def __post_init__(self) -> None:
        if "centered" in self.steps[1:]:
            raise PrecisionError(f"transform {self.name}: only the first step can be centered")
        if self.has_values and (self.centered or self.balanced):
            raise PrecisionError(f"transform {self.name} is not for values, which have no mu and no lambda")

    @classmethod
    def parse(cls, name: str) -> TransformKind:
        """Look up a transform by its name; `PrecisionError` for unknown, repeated or misordered steps."""
        if name not in TRANSFORMS:
            raise PrecisionError(f"a transform is one of {', '.join(TRANSFORMS)}, steps in that order, not {name!r}")
        return TRANSFORMS[name]

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of the steps, in the order in which they are taken."""
        return () if self.name == "none" else tuple(self.name.split("+"))

    @property
    def centered(self) -> bool:
        """Whether the mean key is subtracted, which takes the constant mu."""
        return "centered" in self.steps

    @property
    def balanced(self) -> bool:
        """Whether channels are divided by the constant lambda."""
        return "balanced" in self.steps

    @property
    def hadamard(self) -> bool:
        """Whether channels are rotated by the Hadamard transform."""
        return "hadamard" in self.steps

    def __str__(self) -> str:
        return self.name


TransformChoice = Literal["all", "hadamard", "none"]
TRANSFORM_CHOICES: Final[tuple[TransformChoice, ...]] = ("all", "hadamard", "none")
"""The transforms that a search chooses from: all, those that hold no constants of a model, or none."""

# The order breaks ties: of equal scores the transform that stands first is taken. A capital letter means rotated keys.
TRANSFORMS: Final = {
    kind.name: kind
    for kind in (
        TransformKind("none", ".", has_values=True),
        TransformKind("hadamard", "H", has_values=True),
        TransformKind("balanced", "b"),
        TransformKind("balanced+hadamard", "B"),
        TransformKind("centered", "c", is_candidate=False),
        TransformKind("centered+hadamard", "C", is_candidate=False),
        TransformKind("centered+balanced", "x"),
        TransformKind("centered+balanced+hadamard", "X"),
    )
}


def transform_names(side: Side) -> tuple[str, ...]:
    """The names of the transforms that keys or values may have."""
    return tuple(name for name, kind in TRANSFORMS.items() if side == "k" or kind.has_values)


def candidate_transforms(side: Side, choice: TransformChoice = "all") -> tuple[str, ...]:
    """The names of the transforms that calibration measures for keys or values, as far as they are chosen from."""
    allowed = {"all": TRANSFORMS, "hadamard": ("none", "hadamard"), "none": ("none",)}[choice]
    return tuple(name for name in transform_names(side) if TRANSFORMS[name].is_candidate and name in allowed)
