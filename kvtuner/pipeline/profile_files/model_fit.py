"""Whether a profile is for a model, by configuration and files alone: no weights are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.calibration.model_loading import ModelSource, read_config
from kvtuner.exported_configs.identity.mismatch import Mismatch, Policy, compare_models, refuse
from kvtuner.exported_configs.identity.model_identity import identity_of
from kvtuner.pipeline.progress import say
from kvtuner.runtime_loader.model_check import calibrated_positions, check_model

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import ModelIdentity


def warn_of_mismatches(profile: Profile, model: ModelIdentity, context_length: int) -> list[Mismatch]:
    """Warn where the model that is measured is not quite the profile's; measuring it is right all the same."""
    policy = Policy(allow_derived=True, rescore="this evaluation")
    positions = calibrated_positions(profile)
    mismatches = compare_models(profile.model, model, policy, positions=positions, context_length=context_length)
    refuse(mismatches)
    for mismatch in mismatches:
        if mismatch.severity == "warning":
            say(f"warning: {mismatch.text}")
    return mismatches


def model_mismatches(profile: Profile, model: str, policy: Policy) -> list[Mismatch]:
    """The mismatches between a profile and a model, by the model's configuration and files alone."""
    source = ModelSource(model)
    config = read_config(source)
    check_model(profile, config)
    identity = identity_of(config, id=model, revision=None, dtype=profile.model.dtype, files=source.path)
    positions = calibrated_positions(profile)
    return compare_models(profile.model, identity, policy, positions=positions, context_length=identity.max_positions)
