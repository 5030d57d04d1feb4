"""The fair rival of a searched profile: the best uniform of its search, as a profile of its own. Measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from kvtuner.calibration.sensitivity import TABLE_FILE, SensitivityTable
from kvtuner.errors import KVTunerError, ProfileError, RunFolderError
from kvtuner.evaluation.cache_scheme import ProfileScheme
from kvtuner.exported_configs.profile.build import (
    AskedBudget,
    LayerQuantization,
    build_profile,
    of_whole_model,
    place_constants,
)
from kvtuner.exported_configs.verdict import TRANSFORMED
from kvtuner.layer_geometry import CacheGeometry
from kvtuner.layer_ranges import write_ranges
from kvtuner.pipeline.options import SCORES
from kvtuner.pipeline.stages.search_output import chosen_layers
from kvtuner.precision import PrecisionPair
from kvtuner.run_folder import RunFolder
from kvtuner.search_spaces.space import uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.calibration.sensitivity import ScoreName
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.sharing.reference import ResolvedProfile

WITHOUT_TRANSFORMS: Final = " of the search"
"""The end of the name of a best uniform without transforms, whose grids and window are not those of a plain pair."""


def best_uniform_scheme(resolved: ResolvedProfile) -> ProfileScheme:
    """The best uniform inside a profile's budget, with the transforms, grids and window that its search gave it.

    It is the profile that a search with ``--layers`` would make of the same sensitivity table, which must lie beside
    the profile's file.

    Raises:
        ProfileError: The profile names no best uniform or is it, or the table is absent, damaged or of another search.
            The message may be shared: it has no path.
    """
    profile, folder, file = resolved.profile, RunFolder(resolved.path.parent), resolved.name
    if profile.quality is None or profile.quality.best_uniform is None:
        raise ProfileError(f"{file} names no best uniform in its budget: no search measured one")
    if not resolved.is_own or not folder.file(TABLE_FILE).exists():
        raise ProfileError(
            f"{file} has no {TABLE_FILE} beside it, which the transforms of a uniform come from; give the"
            " run folder of its search"
        )
    try:
        table = SensitivityTable.load(folder)
    except RunFolderError as error:  # which names the path
        raise ProfileError(
            f"the {TABLE_FILE} beside {file} is damaged or of another version; delete it, and run the search again"
        ) from error
    score = _checked_score(profile, table, file)
    name = profile.quality.best_uniform.name
    pair, has_transforms = PrecisionPair.parse(name.removesuffix(TRANSFORMED)), name.endswith(TRANSFORMED)
    configuration = uniform(table, pair, score, profile.row_shape(), transforms=has_transforms)
    asked = write_ranges([pair] * len(configuration), ids=table.geometry.ids)
    found = _built_like(profile, table, chosen_layers(table, configuration), asked=asked)
    if found.digest == profile.digest:
        raise ProfileError(f"{file} is the best uniform in its budget itself, {name}")
    return ProfileScheme.of(name if has_transforms else f"{name}{WITHOUT_TRANSFORMS}", found)


def _checked_score(profile: Profile, table: SensitivityTable, file: str) -> ScoreName:
    """The score that the profile was chosen by; refuses a table that it was not chosen from.

    With the table's constants the same profile must come out.
    """
    other = ProfileError(
        f"the {TABLE_FILE} beside {file} is of another search; give the run folder of the profile's own"
    )
    calibration = profile.provenance.calibration
    if calibration is None or calibration.token_ids_sha256.calibrate != table.identity.get("calibrate_tokens"):
        raise other
    if profile.tuned_geometry().ids != table.geometry.ids or calibration.score not in SCORES:
        raise other
    layers = [
        LayerQuantization(
            pair.k_bits,
            pair.v_bits,
            table.constants_of(layer, "k", profile.transform_name(layer, "k")),
            table.constants_of(layer, "v", profile.transform_name(layer, "v")),
        )
        for layer, pair in zip(table.geometry.ids, profile.tuned_pairs, strict=True)
    ]
    try:
        again = _built_like(profile, table, layers, asked=profile.budget.asked)
    except KVTunerError as error:  # another model's layers or heads
        raise other from error
    if again.digest != profile.digest:
        raise other
    return cast("ScoreName", calibration.score)


def _built_like(
    profile: Profile, table: SensitivityTable, layers: Sequence[LayerQuantization], *, asked: str
) -> Profile:
    """A profile of other layers with all else that a profile was searched with; nothing was measured of it."""
    rows, grids, budget = profile.row_shape(), profile.defaults.k, profile.budget
    cache = profile.geometry.by_layer() if profile.geometry.is_by_layer else CacheGeometry.of(table.geometry)
    geometry, layers = of_whole_model(cache, layers)
    built = build_profile(
        geometry=geometry,
        layers=layers,
        k_layout=rows.k_layout,
        v_layout=rows.v_layout,
        symmetric=grids.symmetric,
        fit=grids.grid_fit,
        window=profile.window,
        model=profile.model,
        budget=AskedBudget(asked, budget.tp_size, budget.pp_size),
        provenance=profile.provenance.model_copy(update={"search": None, "command": None}),
    )
    return place_constants(built, "inline" if profile.constants_sha256 is None else "file")
