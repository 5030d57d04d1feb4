"""Import and export by the name of a format. Knows nothing of files or flags."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtuner.errors import PrecisionError, ProfileError
from kvtuner.exported_configs.formats import FORMATS
from kvtuner.exported_configs.formats.export_requirements import refusal
from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, build_profile, unsearched
from kvtuner.precision import NATIVE_BITS, check_group_size, check_token_group

if TYPE_CHECKING:
    from kvtuner.exported_configs.formats.export_requirements import Exported
    from kvtuner.exported_configs.formats.import_result import Imported, ImportOptions
    from kvtuner.exported_configs.profile.evidence import ModelIdentity
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.geometry import ModelGeometry


def read(data: bytes, name: str, geometry: ModelGeometry, options: ImportOptions) -> Imported:
    """Read another tool's file.

    Args:
        data: The content of the file.
        name: The name of the format, one of `formats.readable`.
        geometry: The geometry of the model that the file is for.
        options: The options that the user adds to the file.

    Raises:
        ProfileError: the file is wrong, or an option means nothing to the format.
    """
    reader = FORMATS[name]
    assert reader.read is not None
    for flag in options.flags_beyond(reader.options):
        raise ProfileError(f"{name} files say that themselves, or do not have it; leave {flag} out")
    imported = reader.read(data, geometry, options)
    _check_groups(imported, geometry)
    return imported


def write(profile: Profile, name: str, *, lossy: bool = False) -> Exported:
    """Write a profile as another tool's file.

    Args:
        profile: The profile.
        name: The name of the format, one of `formats.writable`.
        lossy: Whether to drop what the format cannot say, where something useful is left; the notes say what.

    Raises:
        ProfileError: the format cannot say it; names the first layer and what would be lost.
    """
    writer = FORMATS[name]
    if lossy and not writer.can_lose:
        raise ProfileError(f"{name} is never written with a loss; leave --lossy out")
    exported = writer.write(profile)
    if exported.lost and not lossy:
        raise refusal(name, exported.lost, "--lossy drops that")
    dropped = (f"dropped, from layer {feature.layer} on: {feature.what}" for feature in exported.lost)
    return replace(exported, notes=(*exported.notes, *dropped))


def to_profile(imported: Imported, name: str, geometry: ModelGeometry, model: ModelIdentity) -> Profile:
    """Build the profile of an imported file: without transforms and measurements."""
    return build_profile(
        geometry=geometry,
        layers=[LayerQuantization(pair.k_bits, pair.v_bits) for pair in imported.layers],
        k_group_size=imported.k_group_size,
        v_group_size=imported.v_group_size,
        symmetric=imported.symmetric,
        k_granularity=imported.k_granularity,
        model=model,
        budget=AskedBudget(f"imported from {name}"),
        quality=None,
        provenance=unsearched(),
    )


def _check_groups(imported: Imported, geometry: ModelGeometry) -> None:
    check_keys = check_token_group if imported.k_granularity == "per_channel" else check_group_size
    for layer, pair in enumerate(imported.layers):
        for name, check, head_dim, bits, group in (
            ("keys", check_keys, geometry.head_dim, pair.k_bits, imported.k_group_size),
            ("values", check_group_size, geometry.v_head_dim, pair.v_bits, imported.v_group_size),
        ):
            if bits == NATIVE_BITS:
                continue
            try:
                check(head_dim, bits, group)
            except PrecisionError as error:
                raise ProfileError(f"layer {layer}, {name}: {error}; say so with --group-size") from error
