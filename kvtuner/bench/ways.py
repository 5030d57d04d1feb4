"""Ways to serve a model that are put side by side, and the flags that ask SGLang for them. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvtuner.evaluation.scheme import REFERENCE, named, of_profile
from kvtuner.evaluation.validation import FP8
from kvtuner.exported_configs.profile.build import dump_profile
from kvtuner.exported_configs.profile.evaluation_record import PROFILE
from kvtuner.run_folder import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvtuner.calibration.model_loading import ModelShape
    from kvtuner.evaluation.scheme import Subject
    from kvtuner.exported_configs.profile.profile import Profile

PER_CHANNEL: Final = "K4V4-per-channel"
GROUPS: Final = {
    "A": REFERENCE,
    "B": "K8V8",
    "C": "K4V4",
    "D": "K2V2",
    "E": "K8V4",
    "F": PER_CHANNEL,
    "G": "K4V4-symmetric",
}
"""Ablation by the letters of its groups: what is stored otherwise than in C, which is per token and asymmetric."""
ABLATION: Final = (*GROUPS.values(), FP8)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to serve.

    Attributes:
        name: such as ``profile``, ``bf16``, ``fp8``, ``K8V8``.
        subject: how it stores the cache; None where no offline host can.
        flags: of SGLang.
    """

    name: str
    subject: Subject | None
    flags: tuple[str, ...]

    @property
    def group(self) -> str | None:
        """Its letter in the ablation."""
        return next((letter for letter, name in GROUPS.items() if name == self.name), None)

    @property
    def bytes_per_token(self) -> int | None:
        """On one rank that holds all heads."""
        return None if self.subject is None else self.subject.bytes_per_token

    def served(self) -> dict[str, Any]:
        """What decides how it answers: plain JSON values, without paths."""
        digest = self.subject.profile.digest if self.subject is not None and self.subject.profile is not None else None
        return {"name": self.name, "digest": digest, "flags": [] if digest else list(self.flags)}


def is_uniform(way: Way) -> bool:
    """Whether it is a profile that was made here, not searched."""
    return way.name != PROFILE and way.subject is not None and way.subject.profile is not None


def make_ways(names: Sequence[str], path: Path, profile: Profile, shape: ModelShape, folder: Path) -> list[Way]:
    """Ways by their names; uniform ones get a profile file of their own.

    Args:
        names: see `Way`.
        path: of the profile.
        profile: what it holds.
        shape: of the model.
        folder: for files of uniform ways.

    Raises:
        PrecisionError: a name that is no way.
        RunFolderError: a file that cannot be written.
    """
    return [_way(name, path, profile, shape, folder) for name in names]


def _way(name: str, path: Path, profile: Profile, shape: ModelShape, folder: Path) -> Way:
    if name == PROFILE:
        return Way(name, of_profile(name, profile), ("--kvtuner-profile", str(path.absolute())))
    if name == PER_CHANNEL:
        bits = ("--kvtuner-nbits-key", "4", "--kvtuner-nbits-value", "4")
        return Way(name, None, ("--enable-kvtuner-quant", *bits, "--kvtuner-axis-key", "1"))
    subject = named(name, shape)
    if name == REFERENCE:
        return Way(name, subject, ())
    if subject.profile is None:
        return Way(name, subject, ("--kv-cache-dtype", "fp8_e4m3"))
    file = (folder / f"{subject.name}.json").absolute()
    write_atomically(file, dump_profile(subject.profile))
    return Way(subject.name, subject, ("--kvtuner-profile", str(file)))
