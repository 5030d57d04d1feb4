"""The profile that a command is given, and what it fills in of the command's options."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from kvtuner.calibration.model_loading import DEMO
from kvtuner.errors import ProfileError
from kvtuner.exported_configs.identity.model_identity import is_hub_id
from kvtuner.exported_configs.sharing.profile_resolution import ResolvedProfile, find_profile, find_profiles
from kvtuner.pipeline.option_types import MAX_SEED
from kvtuner.pipeline.progress import say

if TYPE_CHECKING:
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.pipeline.bench_options import BenchOptions
    from kvtuner.pipeline.evaluation_options import EvalOptions

MeasuringOptions = TypeVar("MeasuringOptions", "EvalOptions", "BenchOptions")


def profile_of(text: str) -> ResolvedProfile:
    """The one profile that a name stands for; notes on how it was found go to stderr."""
    return _with_notes([find_profile(text)])[0]


def profiles_of(text: str) -> list[ResolvedProfile]:
    """All profiles that a name stands for: a run folder may hold several."""
    return _with_notes(find_profiles(text))


def _with_notes(profiles: list[ResolvedProfile]) -> list[ResolvedProfile]:
    for profile in profiles:
        for note in profile.notes:
            say(note)
    return profiles


def with_profile_defaults(options: MeasuringOptions, profile: Profile) -> MeasuringOptions:
    """Options whose gaps the profile's search fills: the model, the cut of the corpus and so its unseen part, the seed.

    A model of a folder must be named again: nothing finds it by the profile's name for it.
    """
    model, data, seed = options.model, options.data, options.seed
    if model.model is None:
        name, revision = profile.model.id, model.revision or profile.model.revision
        if name != DEMO and not is_hub_id(name) and revision is None:
            raise ProfileError(f"the profile is for a model of a folder called {name}; give --model FOLDER")
        model = replace(model, model=name, revision=revision)
        say(f"no --model given: taking {name}{f'@{revision}' if revision else ''}")
    record = profile.provenance.calibration
    if record is None:
        return replace(options, model=model, seed=seed or 0)
    if seed is None:
        # The seed of a file may be larger than generators take.
        seed = record.seed if record.seed < MAX_SEED else 0
    counts = record.num_sequences
    sequences = data.sequences
    # A file may have counts that no search takes.
    if sequences is None and min(counts.calibrate, counts.select, counts.report - 1) > 0:
        sequences = (counts.calibrate, counts.select, counts.report)
    if data.data is None and record.corpus != DEMO:
        say(f"the search read {record.corpus}; without --data the shipped demo corpus is taken")
    model = replace(model, context_length=model.context_length or record.position_range[1] + 1)
    # Cut as the search cut it, the same sequences are those that no layer was chosen on.
    data = replace(data, sequence_length=data.sequence_length or record.sequence_length, sequences=sequences)
    return replace(options, model=model, data=data, seed=seed)
