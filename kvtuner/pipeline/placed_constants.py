"""The place of a profile's constants that the user asked for, and what to say where there is nothing to place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.exported_configs.profile.build import place_constants
from kvtuner.pipeline.progress import say

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.precision import ConstantsPlace


def place_as_asked(profile: Profile, place: ConstantsPlace) -> Profile:
    """The profile with its constants where `--constants` says; says so where it has none for a side file."""
    placed = place_constants(profile, place)
    if place == "file" and placed.constants_sha256 is None:
        say("--constants file: the profile has neither mu nor lambda, so there is no side file")
    return placed
