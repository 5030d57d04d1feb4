"""Profiles from and to the files of other tools. Knows nothing of paths or flags.

A new format is a module here with `write`, and perhaps `read`, and one row of `FORMATS`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from kvtuner.errors import PrecisionError, ProfileError
from kvtuner.exported_configs.formats import dtype_ranges, kvtuner_yaml, modelopt, optiq, vllm_skip_layers
from kvtuner.exported_configs.formats.conversion import refusal
from kvtuner.exported_configs.formats.kvtuner_yaml import PRESETS as PRESETS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtuner.exported_configs.formats.conversion import Exported, Imported, ImportOptions, Storage
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import ModelIdentity
    from kvtuner.geometry import ModelGeometry
    from kvtuner.precision import PrecisionPair


@dataclass(frozen=True, slots=True)
class Format:
    """One format of another tool. Its functions raise `ProfileError` for what they cannot write or read.

    Attributes:
        write: The function that makes the format's file of a profile.
        read: The function that reads the format's file; None where it cannot be imported.
        options: The fields of `ImportOptions` that mean something to the format.
        can_lose: Whether ``--lossy`` may write a file without all that the profile says.
    """

    write: Callable[[Profile], Exported]
    read: Callable[[bytes, ModelGeometry, ImportOptions], Imported] | None = None
    options: tuple[str, ...] = ()
    can_lose: bool = False


FORMATS: Final = {
    "kvtuner-yaml": Format(kvtuner_yaml.write, kvtuner_yaml.read, ("scheme", "group_size")),
    "modelopt": Format(modelopt.write, modelopt.read, ("words", "group_size", "symmetric")),
    "optiq": Format(optiq.write, optiq.read, ("group_size",)),
    "ranges": Format(
        dtype_ranges.write, dtype_ranges.read, ("words", "group_size", "symmetric", "default_word"), can_lose=True
    ),
    "vllm-skip-layers": Format(vllm_skip_layers.write, can_lose=True),
}


def readable() -> tuple[str, ...]:
    """The names of the formats that can be imported."""
    return tuple(name for name, form in FORMATS.items() if form.read is not None)


def writable() -> tuple[str, ...]:
    """The names of the formats that can be exported."""
    return tuple(FORMATS)


def read(
    data: bytes, name: str, geometry: ModelGeometry, model: ModelIdentity, options: ImportOptions
) -> tuple[Profile, tuple[str, ...]]:
    """Read the content of another tool's file for a model, by the name of its format.

    The profile has no transforms and measurements, and the notes say what the file left open. A file that is wrong, or
    an option that means nothing to the format, is a `ProfileError`.
    """
    from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, build_profile, unsearched

    reader = FORMATS[name]
    assert reader.read is not None
    for flag in options.flags_beyond(reader.options):
        raise ProfileError(f"{name} files say that themselves, or do not have it; leave {flag} out")
    imported = reader.read(data, geometry, options)
    pairs = imported.all_pairs(geometry.num_layers)
    _check_groups(pairs, imported.storage, geometry)
    profile = build_profile(
        geometry=geometry,
        layers=[LayerQuantization(pair.k_bits, pair.v_bits) for pair in pairs],
        **asdict(imported.storage),
        model=model,
        budget=AskedBudget(f"imported from {name}"),
        quality=None,
        provenance=unsearched(),
    )
    return profile, imported.notes


def write(profile: Profile, name: str, *, lossy: bool = False) -> Exported:
    """Write a profile as another tool's file; `ProfileError` for what it cannot say, unless `lossy` drops it."""
    writer = FORMATS[name]
    if lossy and not writer.can_lose:
        raise ProfileError(f"{name} is never written with a loss; leave --lossy out")
    exported = writer.write(profile)
    if exported.lost and not lossy:
        lost = [feature._replace(way_out="--lossy drops that") for feature in exported.lost]
        raise refusal(name, lost if writer.can_lose else exported.lost)
    dropped = (f"dropped, from layer {feature.layer} on: {feature.what}" for feature in exported.lost)
    return replace(exported, notes=(*exported.notes, *dropped))


def _check_groups(pairs: Sequence[PrecisionPair], storage: Storage, geometry: ModelGeometry) -> None:
    shape = geometry.row_shape(k_group_size=storage.k_group_size, v_group_size=storage.v_group_size)
    shape = replace(shape, k_granularity=storage.k_granularity)
    for layer, pair in enumerate(pairs):
        for noun, row_bytes, bits in (("keys", shape.k_bytes, pair.k_bits), ("values", shape.v_bytes, pair.v_bits)):
            try:
                row_bytes(bits)
            except PrecisionError as error:
                raise ProfileError(f"layer {layer}, {noun}: {error}; say so with --group-size") from error
