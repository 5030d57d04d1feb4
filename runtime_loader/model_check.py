"""Whether a profile can serve a model, by its configuration alone. Knows nothing of weights or ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.profile.profile import NO_TAIL_PAGES
from kvtuner.supported_models import refuse_other_caches

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.geometry import ConfigLike


def check_model(profile: Profile, config: ConfigLike, *, context_length: int | None = None) -> None:
    """Check that a profile fits a model whose layers read all of the cache of `context_length` tokens.

    That is the context that the profile was made for, by default.

    Raises:
        UnsupportedModelError: A layer's cache is not one key and value per token and head.
        ProfileError: The profile belongs to another model, or quantizes keys per channel, which no cache can.
    """
    refuse_other_caches(config, context_length=context_length or calibrated_positions(profile))
    profile.check_model(config)
    if profile.has_per_channel_keys:
        raise ProfileError(NO_TAIL_PAGES)


def calibrated_positions(profile: Profile) -> int | None:
    """The context that a profile was made for, in tokens; None for a hand-written one."""
    record = profile.provenance.calibration
    return None if record is None else record.position_range[1] + 1
