"""The sources that options name: the model, its text, the run folder, and a profile with its model."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from kvtuner.calibration.corpus import Corpus, CorpusSource, load_corpus
from kvtuner.calibration.model_loading import ModelShape, ModelSource, load_processor, load_tokenizer, read_shape
from kvtuner.errors import CorpusError, OptionError, ProfileError
from kvtuner.evaluation.scheme_registry import named_schemes
from kvtuner.exported_configs.identity.mismatch import Mismatch, Policy, compare_models, refuse
from kvtuner.exported_configs.identity.model_identity import DEMO, is_hub_id
from kvtuner.exported_configs.profile.evaluation_record import PROFILE_SCHEME
from kvtuner.exported_configs.scheme_names import BEST_UNIFORM, REFERENCE
from kvtuner.pipeline.flags.number_readers import MAX_SEED
from kvtuner.pipeline.progress import say
from kvtuner.pipeline.stages.best_uniform import best_uniform_scheme
from kvtuner.run_folder import RUNS, RunFolder
from kvtuner.runtime_loader.model_check import calibrated_positions, check_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import ModelIdentity
    from kvtuner.exported_configs.sharing.reference import ResolvedProfile
    from kvtuner.pipeline.eval_bench_options import BenchOptions, EvalOptions
    from kvtuner.pipeline.options import DataOptions, ModelOptions

_FIRST: Final = (REFERENCE, PROFILE_SCHEME, BEST_UNIFORM)
SEQUENCE_LENGTH: Final = 2048
SEQUENCES: Final = (16, 8, 16)
# The demo model was trained on 512 tokens.
DEMO_SEQUENCE_LENGTH: Final = 512
DEMO_SEQUENCES: Final = (16, 12, 12)

MeasuringOptions = TypeVar("MeasuringOptions", "EvalOptions", "BenchOptions")


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
    return RunFolder(Path(out) if out else Path(RUNS) / f"{model_source(model).name.replace('/', '--')}-{name}")


class ProfiledModel(Generic[MeasuringOptions]):
    """A profile with the model that it is measured on, its text, and the schemes to compare; no weights are loaded.

    The options have what the profile's search fills in. The unquantized scheme is first, where it is asked at all, then
    the profile and the best uniform of its search, which is None where it is not asked; their names are those given, or
    those of the endpoints. URLs of servers are by the name of the scheme; there are none where no endpoint is given.
    The folder keeps what is measured.
    """

    def __init__(
        self, options: MeasuringOptions, resolved: ResolvedProfile, *, names: Sequence[str], folder_prefix: str
    ) -> None:
        profile = self.profile = resolved.profile
        options = _with_search_settings(options, profile)
        self.options: MeasuringOptions = options
        self.seed, self.source = options.seed or 0, model_source(options.model)
        shape = self.shape = read_shape(self.source)
        check_model(profile, shape.config, context_length=shape.context_length)
        names = [name for name, _ in options.endpoint] if options.endpoint else names
        names = sorted(names, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
        self.best_uniform = best_uniform_scheme(resolved) if BEST_UNIFORM in names else None
        self.schemes = named_schemes(names, shape, profile, resolved.path, self.best_uniform)
        urls = dict(options.endpoint or ())
        self.urls = {scheme.name: urls[name] for scheme, name in zip(self.schemes, names, strict=True) if urls}
        folder_name = f"{folder_prefix}-{profile.digest.removeprefix('sha256:')[:12]}"
        self.folder = run_folder(options.model, options.out, folder_name)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(self.source)
        self.identity = shape.identity(self.source, profile.model.dtype, self.tokenizer)
        self.mismatches = warn_of_mismatches(profile, self.identity, shape.context_length)
        self.corpus_source = corpus_source(options.data, options.model, shape, seed=self.seed)

    @cached_property
    def corpus(self) -> Corpus:
        """The text, loaded where it is first needed: what nobody can measure is refused before it is fetched."""
        return load_corpus(self.corpus_source, self.tokenizer, lambda: load_processor(self.source))


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


def searched_model(model: ModelOptions, profile: Profile) -> ModelOptions:
    """The model that options name, or else the profile's; says which it takes.

    A model of a folder must be named again, or a `ProfileError` says so: nothing finds it by the profile's name for it.
    """
    if model.model is not None:
        return model
    name, revision = profile.model.id, model.revision or profile.model.revision
    if name != DEMO and not is_hub_id(name) and revision is None:
        raise ProfileError(f"the profile is for a model of a folder called {name}; give --model FOLDER")
    say(f"no --model given: taking {name}{f'@{revision}' if revision else ''}")
    return replace(model, model=name, revision=revision)


def _with_search_settings(options: MeasuringOptions, profile: Profile) -> MeasuringOptions:
    """Options whose gaps the profile's search fills: model, cut of the corpus and so its unseen part, and seed."""
    model, data, seed = searched_model(options.model, profile), options.data, options.seed
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
