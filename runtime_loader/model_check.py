"""Whether a profile can serve a model, by its configuration alone. Knows nothing of weights or ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.identity.mismatch import Policy, compare_models, refuse
from kvtuner.exported_configs.identity.model_identity import identity_of, is_hub_id, public_name
from kvtuner.layer_geometry import index_text
from kvtuner.supported_models import read_cache_geometry

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import ModelIdentity
    from kvtuner.geometry import ConfigLike
    from kvtuner.layer_geometry import CacheGeometry


def check_model(profile: Profile, config: ConfigLike, *, context_length: int | None = None) -> None:
    """Check that a profile fits a model in a context of `context_length` tokens.

    That is the context that the profile was made for, by default.

    Raises:
        UnsupportedModelError: A layer's cache is none that is searched.
        GeometryError: The configuration does not tell its heads.
        ProfileError: The profile belongs to another model, or its exact window is shorter than a group of tokens.
    """
    cache = read_cache_geometry(config, context_length=context_length or calibrated_positions(profile))
    geometry = cache.tuned()
    if geometry.layer_ids is None and not profile.geometry.is_by_layer:
        profile.check_model(config)
    else:
        whole = profile.geometry.whole()
        profile.check_geometry(whole.tuned(), geometry)
        _check_kinds(profile, whole, cache)
    check_token_groups(profile)


def check_token_groups(profile: Profile) -> None:
    """Refuse keys per channel that no cache can hold by a `ProfileError`: of latents, and beside a shorter window."""
    if not profile.has_per_channel_keys:
        return
    if profile.tuned_geometry().is_latent:
        raise ProfileError("latents are stored per token, not per channel; use a profile of per_token keys")
    group, exact = profile.defaults.k.group_size, profile.window.residual_length
    if exact < group:
        raise ProfileError(
            f"per-channel keys of {group} tokens per scale need residual_length {group} or more, not {exact}: tokens"
            " are kept exactly until their group is full; import or build the profile again with it"
        )


def _check_kinds(profile: Profile, whole: CacheGeometry, cache: CacheGeometry) -> None:
    """Compare what each layer caches; heads of windows are compared by the model's own cache, which has them."""
    if len(whole.layers) != len(cache.layers):
        raise ProfileError(
            f"the profile of {profile.model.id} has {len(whole.layers)} layers, but this model has"
            f" {len(cache.layers)}; use one that was searched for it"
        )
    for layer_id, (own, other) in enumerate(zip(whole.layers, cache.layers, strict=True)):
        if own.kind != other.kind:
            raise ProfileError(
                f"layer {layer_id} has kind {own.kind} in the profile of {profile.model.id}, but {other.kind} in this"
                " model and context; use a profile that was searched for them"
            )
        if own.index_dim != other.index_dim:
            raise ProfileError(
                f"layer {layer_id} has {index_text(own.index_dim)} in the profile of {profile.model.id}, but"
                f" {index_text(other.index_dim)} in this model; use a profile that was searched for it"
            )


def check_served_model(
    profile: Profile, config: ConfigLike, *, context_length: int | None = None, allow_derived: bool = False
) -> list[str]:
    """Check that a model is also the one that a profile was made for; returns warnings of what differs without harm.

    With `allow_derived` a fine-tune, or another configuration of the same geometry, is no error.

    Raises:
        UnsupportedModelError: See `check_model`.
        ProfileError: The profile belongs to another model.
    """
    check_model(profile, config, context_length=context_length)
    policy = Policy(allow_derived=allow_derived, allow_flag="allow_derived=True")
    positions = calibrated_positions(profile)
    mismatches = compare_models(
        profile.model, _identity(config, profile), policy, positions=positions, context_length=context_length
    )
    refuse(mismatches)
    return [mismatch.text for mismatch in mismatches if mismatch.severity == "warning"]


def _identity(config: ConfigLike, profile: Profile) -> ModelIdentity:
    """The model that a configuration describes; what it does not know, such as a folder's hub id, is as wanted."""
    loaded_from = str(getattr(config, "_name_or_path", ""))
    name = loaded_from if is_hub_id(public_name(loaded_from)) else profile.model.id
    return identity_of(config, id=name, revision=None, dtype=profile.model.dtype)


def calibrated_positions(profile: Profile) -> int | None:
    """The context that a profile was made for, in tokens; None for a hand-written one."""
    record = profile.provenance.calibration
    return None if record is None else record.position_range[1] + 1
