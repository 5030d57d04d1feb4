"""What search and calibrate share: flags to sources, a loaded workbench and its run folder."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvtuner.calibration.batches import Offsets
from kvtuner.calibration.candidate_pass import QuantizationOptions
from kvtuner.calibration.corpus import CorpusSource, load_corpus
from kvtuner.calibration.model_loading import DEMO, ModelShape, ModelSource, load_model
from kvtuner.calibration.workbench import CalibrationOptions, Workbench
from kvtuner.errors import CorpusError, PrecisionError
from kvtuner.evaluation.rank_bytes import ServingRanks
from kvtuner.evaluation.validation import SequenceSums
from kvtuner.pipeline.progress import say
from kvtuner.precision import PACKED_BITS, RowShape, check_group_size
from kvtuner.run_folder import RunFolder

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Mapping

    from kvtuner.calibration.sensitivity import SensitivityTable
    from kvtuner.precision import PrecisionPair
    from kvtuner.report.search_rows import Fits
    from kvtuner.search_spaces.space import Configuration
    from kvtuner.tuner.exact import Front
    from kvtuner.tuner.study import StudyResult

DEFAULT_SEQUENCE_LENGTH = 2048
DEMO_SEQUENCE_LENGTH = 512
DEFAULT_SEQUENCES = (8, 8, 16)
DEMO_SEQUENCES = (4, 12, 12)


def model_source(args: Namespace) -> ModelSource:
    """The model that the flags name."""
    return ModelSource(
        model=args.model,
        revision=args.revision,
        device=args.device,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
        context_length=args.context_length,
    )


def corpus_source(args: Namespace, shape: ModelShape) -> CorpusSource:
    """The data that the flags name.

    Raises:
        CorpusError: sequences longer than the context.
    """
    if args.sequence_length is not None and args.sequence_length > shape.context_length:
        raise CorpusError(
            f"--sequence-length {args.sequence_length} must fit the context of {shape.context_length} tokens;"
            " give a shorter one"
        )
    default = DEMO_SEQUENCE_LENGTH if args.model == DEMO else DEFAULT_SEQUENCE_LENGTH
    return CorpusSource(
        data=args.data or DEMO,
        data_config=args.data_config,
        data_split=args.data_split,
        text_field=args.text_field,
        sequence_length=args.sequence_length or min(default, shape.context_length),
        num_sequences=args.sequences or (DEMO_SEQUENCES if args.model == DEMO else DEFAULT_SEQUENCES),
        seed=args.seed,
        deduplicate=args.deduplicate,
    )


def calibration_options(args: Namespace, shape: ModelShape) -> CalibrationOptions:
    """How the flags want sensitivity measured.

    Raises:
        PrecisionError: a group size that the model's heads cannot be packed with at every width.
    """
    geometry = shape.geometry
    for flag, head_dim, group in (
        ("--k-group-size", geometry.head_dim, args.k_group_size),
        ("--v-group-size", geometry.v_head_dim, args.v_group_size),
    ):
        for bits in PACKED_BITS:
            if group is not None:
                try:
                    check_group_size(head_dim, bits, group)
                except PrecisionError as error:
                    raise PrecisionError(f"{flag} {group}: {error}") from error
    return CalibrationOptions(
        read_plan=args.read_plan,
        score=args.score,
        num_draws=args.fisher_draws,
        batch_size=args.batch_size,
        quant=QuantizationOptions(args.k_group_size, args.v_group_size, args.symmetric),
        with_pairs=args.pairs,
        seed=args.seed,
    )


def row_shape(args: Namespace, shape: ModelShape) -> RowShape:
    """Rows of the whole model under the flags' group sizes."""
    return shape.geometry.row_shape(k_group_size=args.k_group_size, v_group_size=args.v_group_size)


def ranks_of(args: Namespace, shape: ModelShape) -> ServingRanks:
    """The ranks that the flags say will serve.

    Raises:
        GeometryError: the model cannot be split over them.
    """
    return ServingRanks.of(
        shape.geometry,
        k_group_size=args.k_group_size,
        v_group_size=args.v_group_size,
        tp_size=getattr(args, "tp_size", 1),  # calibrate has no such flags
        pp_size=getattr(args, "pp_size", 1),
    )


def run_folder(args: Namespace, name: str) -> RunFolder:
    """The folder that ``--out`` names, or ``runs/<model>-<name>``."""
    model = ModelSource(args.model).name.replace("/", "--")
    return RunFolder(Path(args.out) if args.out else Path("runs") / f"{model}-{name}")


def prepare(args: Namespace, shape: ModelShape) -> Workbench:
    """Load model, tokenizer and corpus."""
    source = model_source(args)
    data = corpus_source(args, shape)
    options = calibration_options(args, shape)
    if args.data is None and args.model != DEMO:
        say(
            "no --data given: measuring on the shipped demo corpus (Python sources and generated tables);"
            " prompts like the ones you serve give a better profile"
        )
    loaded = load_model(source, shape)
    corpus = load_corpus(data, loaded.tokenizer)
    return Workbench.prepare(loaded, corpus, options)


@dataclass
class Phases:
    """Counts forward passes and says what is being done.

    Attributes:
        bench: whose chain counts.
        folder: holds the event log.
        passes: forward passes over one sequence by phase, partial ones as fractions of their layers.
    """

    bench: Workbench
    folder: RunFolder
    passes: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time and count one phase."""
        say(f"{name} ...")
        counter = self.bench.chain.count
        before, start = counter.layer_tokens, time.monotonic()
        yield
        tokens = (counter.layer_tokens - before) / self.bench.loaded.shape.geometry.num_layers
        passes = tokens / self.bench.corpus.splits["calibrate"].shape[1]
        self.passes[name] = self.passes.get(name, 0.0) + passes
        seconds = time.monotonic() - start
        self.folder.log("phase", name=name, forward_passes=round(passes, 2), seconds=round(seconds, 2))
        say(f"{name}: {passes:.1f} forward passes, {seconds:.1f} s")


@dataclass(frozen=True, slots=True)
class SearchRun:
    """One run of ``kvtuner search`` with everything loaded.

    Attributes:
        command: the command that makes the same profiles again, as it may be shared.
    """

    args: Namespace
    command: str
    shape: ModelShape
    bench: Workbench
    folder: RunFolder
    phases: Phases
    table: SensitivityTable


def say_left_out(run: SearchRun, what: str, reason: str) -> None:
    """Say, here and in the event log, what has no finite KL and takes no further part."""
    run.folder.log("left out", what=what, reason=reason)
    say(f"{what} is left out: {reason}")


Measured = dict[Offsets, SequenceSums]
"""Results of one scheme by kind of offsets."""


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """What a search found for one target.

    Attributes:
        asked: the budget, or the hand-written configuration.
        configuration: the winner.
        measured_kl: of the winner on the select split; None for a uniform without transforms, not measured there.
        fits: whether another scheme would have kept the budget.
        uniform_kl: the K x V table on the select split.
        exact: the exact solution; None if nothing was searched.
        exact_kl: of the exact solution on the select split.
        study: the refinement.
        fronts: exact fronts by pipeline stage.
        uniform_name: the pair of the uniform that replaced the winner, if one did.
    """

    asked: str
    configuration: Configuration
    measured_kl: float | None
    fits: Fits
    uniform_kl: Mapping[PrecisionPair, float]
    exact: Configuration | None = None
    exact_kl: float | None = None
    study: StudyResult | None = None
    fronts: tuple[Front, ...] = ()
    uniform_name: str | None = None

    @property
    def gain(self) -> float | None:
        """By how much refinement went below the exact solution, nats per token on the select split."""
        return None if self.study is None or self.exact_kl is None else self.exact_kl - self.study.best_value

    @property
    def has_transforms(self) -> bool:
        """Whether any keys or values are transformed."""
        return any((choice.k_transform, choice.v_transform) != ("none", "none") for choice in self.configuration)
