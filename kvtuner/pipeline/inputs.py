"""The inputs that options name, which are model, text, run folder and profile, and the provenance of a result."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtuner import __version__
from kvtuner.calibration.corpus import CorpusSource
from kvtuner.calibration.model_loading import DEMO, ModelShape, ModelSource, read_config
from kvtuner.errors import CorpusError, OptionError, ProfileError
from kvtuner.exported_configs.identity.mismatch import Mismatch, Policy, compare, refuse
from kvtuner.exported_configs.identity.model_identity import identity_of, is_hub_id
from kvtuner.exported_configs.profile.evaluation_record import ResultProvenance
from kvtuner.exported_configs.sharing.find import ResolvedProfile, find_profile, find_profiles
from kvtuner.pipeline.option_types import MAX_SEED
from kvtuner.pipeline.progress import say
from kvtuner.run_folder import RunFolder
from kvtuner.runtime_loader.model_check import calibrated_positions, check_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtuner.exported_configs.profile.evidence import ModelIdentity
    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.pipeline.options import DataOptions, ModelOptions

MAX_COMMAND: Final = 2000
SEQUENCE_LENGTH: Final = 2048
SEQUENCES: Final = (8, 8, 16)
DEMO_SEQUENCE_LENGTH: Final = 512
DEMO_SEQUENCES: Final = (4, 12, 12)


def model_source(options: ModelOptions) -> ModelSource:
    """The model that options name; refuses options that name none."""
    if options.model is None:
        raise OptionError("a model is needed: a hub id, a folder, or demo")
    return ModelSource(**asdict(options))


def corpus_source(data: DataOptions, model: ModelOptions, shape: ModelShape, *, seed: int) -> CorpusSource:
    """The text that options name, cut for the model; refuses sequences that are longer than its context."""
    if data.sequence_length is not None and data.sequence_length > shape.context_length:
        raise CorpusError(
            f"--sequence-length {data.sequence_length} must fit the context of {shape.context_length} tokens;"
            " give a shorter one"
        )
    is_demo = model.model == DEMO
    length = data.sequence_length or min(DEMO_SEQUENCE_LENGTH if is_demo else SEQUENCE_LENGTH, shape.context_length)
    return CorpusSource(
        data=data.data or DEMO,
        data_config=data.data_config,
        data_split=data.data_split,
        text_field=data.text_field,
        sequence_length=length,
        num_sequences=data.sequences or (DEMO_SEQUENCES if is_demo else SEQUENCES),
        seed=seed,
        deduplicate=data.deduplicate,
    )


def run_folder(model: ModelOptions, out: str | None, name: str) -> RunFolder:
    """The folder that `out` names, or ``runs/<model>-<name>``."""
    return RunFolder(Path(out) if out else Path("runs") / f"{model_source(model).name.replace('/', '--')}-{name}")


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


def with_profile_defaults(
    model: ModelOptions, data: DataOptions, seed: int | None, profile: Profile
) -> tuple[ModelOptions, DataOptions, int]:
    """Options whose gaps the profile's search fills: the model, the cut of the corpus and so its unseen part, the seed.

    A model of a folder must be named again: nothing finds it by the profile's name for it.
    """
    if model.model is None:
        name, revision = profile.model.id, model.revision or profile.model.revision
        if name != DEMO and not is_hub_id(name) and revision is None:
            raise ProfileError(f"the profile is for a model of a folder called {name}; give --model FOLDER")
        model = replace(model, model=name, revision=revision)
        say(f"no --model given: taking {name}{f'@{revision}' if revision else ''}")
    record = profile.provenance.calibration
    if record is None:
        return model, data, seed or 0
    if seed is None:
        seed = record.seed if record.seed < MAX_SEED else 0
    counts = record.num_sequences
    sequences = data.sequences
    if sequences is None and min(counts.calibrate, counts.select, counts.report - 1) > 0:
        sequences = (counts.calibrate, counts.select, counts.report)
    if data.data is None and record.corpus != DEMO:
        say(f"the search read {record.corpus}; without --data the shipped demo corpus is taken")
    return (
        replace(model, context_length=model.context_length or record.position_range[1] + 1),
        replace(data, sequence_length=data.sequence_length or record.sequence_length, sequences=sequences),
        seed,
    )


def warn_of_mismatches(profile: Profile, model: ModelIdentity, context_length: int) -> list[Mismatch]:
    """Warn where the model that is measured is not quite the profile's; measuring it is right all the same."""
    policy = Policy(allow_derived=True, rescore="this evaluation")
    positions = calibrated_positions(profile)
    mismatches = compare(profile.model, model, policy, positions=positions, context_length=context_length)
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
    return compare(profile.model, identity, policy, positions=positions, context_length=identity.max_positions)


def result_provenance(
    command: Sequence[str], *, seed: int, device: str, has_endpoints: bool, server_device: str | None = None
) -> ResultProvenance:
    """The provenance of a result: the command as it may be shared, and the device of a model loaded here or of servers.

    `has_endpoints` means servers that were there already; `server_device` is that of servers that were started.
    """
    import torch
    import transformers

    is_on_gpu = torch.cuda.is_available() and "cpu" not in (device, server_device) and not has_endpoints
    asked = "asked from " if has_endpoints else ""
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return ResultProvenance(
        kvtuner_version=__version__,
        command=shlex.join(command)[:MAX_COMMAND].strip(),
        machine=_gpus(device) if is_on_gpu else f"{asked}{_processor()}, {cores}",
        torch=torch.__version__,
        transformers=transformers.__version__,
        seed=seed,
    )


def _gpus(device: str) -> str:
    import torch

    index = None if device == "auto" else torch.device(device).index
    count = torch.cuda.device_count() if device == "auto" else 1
    return f"{count} x {torch.cuda.get_device_name(index or 0)}"


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
