"""The run of a search or a calibration: the model, its corpus, the run folder, and the settings of each phase."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvtuner.calibration.auto_settings.scale_layouts import LayoutComparison, compare_layouts, undecided_facts
from kvtuner.calibration.auto_settings.window_lengths import LengthComparison, compare_lengths
from kvtuner.calibration.corpus import load_corpus
from kvtuner.calibration.forward.streamed_layers import streamed_layers_of
from kvtuner.calibration.model_loading import ModelShape, load_model, load_processor, read_shape
from kvtuner.calibration.placement.sharded_weights import bytes_here
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.calibration.workbench import CalibrationOptions, Workbench, measure_table
from kvtuner.errors import OptionError, PrecisionError, SearchSpaceError
from kvtuner.evaluation.cache_scheme import RankLayout
from kvtuner.exported_configs.identity.model_identity import DEMO
from kvtuner.pipeline.progress import say
from kvtuner.pipeline.sources import corpus_source, model_source
from kvtuner.pipeline.stages.scale_words import competing_layouts, given_layouts, layouts_text
from kvtuner.pipeline.stages.work_ahead import ForwardProgress
from kvtuner.precision import THREE_BITS, PrecisionPair, RowShape, check_group_size
from kvtuner.search_spaces.layer_notation import parse_keep
from kvtuner.search_spaces.space import Configuration, uniform
from kvtuner.supported_models import num_selected_tokens
from kvtuner.workers.rank_group import ALONE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from kvtuner.calibration.model_loading import LoadedModel
    from kvtuner.calibration.sensitivity import SensitivityTable
    from kvtuner.pipeline.options import CalibrateOptions, MeasurementOptions, SearchOptions
    from kvtuner.run_folder import RunFolder
    from kvtuner.workers.rank_group import RankGroup


def checked_shape(options: CalibrateOptions) -> ModelShape:
    """The shape of the model, after options that it cannot have are refused; loads no weights."""
    shape = read_shape(model_source(options.model))
    calibration_options(options.measurement, shape)
    return shape


def calibration_options(options: MeasurementOptions, shape: ModelShape) -> CalibrationOptions:
    """The settings of calibration; refuses group sizes that the model's heads cannot be packed with.

    A side whose scale layout is still to be measured has words of 32 bits and groups of a head.
    """
    plain = QuantizationOptions(
        symmetric=options.symmetric,
        fit=options.fit,
        window=options.window,
        three_bits=why_no_three_bits(options, shape) is None,
        transforms=options.transforms,
    )
    _check_groups(options, shape, plain.widths)
    k_layout, v_layout = given_layouts(options, shape, plain.widths)
    return CalibrationOptions(
        read_plan=options.read_plan,
        score=options.score,
        num_draws=options.fisher_draws,
        batch_size=options.batch_size,
        quant=replace(plain, k_layout=k_layout, v_layout=v_layout),
        with_pairs=options.pairs,
        seed=options.seed,
    )


def _check_groups(options: MeasurementOptions, shape: ModelShape, widths: Collection[int]) -> None:
    geometry = shape.geometry
    if geometry.is_latent and (options.v_group_size is not None or options.pairs):
        flag = "--pairs" if options.pairs else "--v-group-size"
        raise OptionError(f"{flag} is of keys and values, but this model caches latents, which are both; leave it out")
    groups = {"k": options.k_group_size, "v": options.v_group_size}
    for side, head_dim in geometry.channels.items():
        flag, group = f"--{side}-group-size", groups[side]
        if group is None:
            continue
        for bits in widths:
            try:
                check_group_size(head_dim, bits, group)
            except PrecisionError as error:
                raise PrecisionError(f"{flag} {group}: {error}") from error


def row_shape(quant: QuantizationOptions, shape: ModelShape) -> RowShape:
    """Rows of the whole model."""
    return shape.geometry.row_shape(quant.k_layout, quant.v_layout)


def why_no_three_bits(options: MeasurementOptions, shape: ModelShape) -> str | None:
    """Why 3 bits are not measured, None where they are: they need heads of a multiple of 16 channels."""
    if not options.three_bits:
        return "leave --no-three-bits out"
    groups = {"k": options.k_group_size, "v": options.v_group_size}
    for side, head_dim in shape.geometry.channels.items():
        try:
            check_group_size(head_dim, THREE_BITS, groups[side] or head_dim)
        except PrecisionError as error:
            return str(error)
    return None


def kept_pairs(options: SearchOptions, shape: ModelShape) -> dict[int, PrecisionPair]:
    """The layers whose pairs are forced; refuses 3 bits that are not measured."""
    pairs = parse_keep(options.keep) if options.keep else {}
    check_measured(pairs.values(), options.measurement, shape)
    return pairs


def check_measured(pairs: Iterable[PrecisionPair], options: MeasurementOptions, shape: ModelShape) -> None:
    """Refuse pairs of 3 bits where these are not measured by a `SearchSpaceError`, and two widths of a latent."""
    for pair in pairs:
        shape.geometry.widths(pair)
        if THREE_BITS in (pair.k_bits, pair.v_bits) and (reason := why_no_three_bits(options, shape)):
            raise SearchSpaceError(f"{pair} needs 3 bits to be measured too; {reason}")


def serving_ranks(quant: QuantizationOptions, shape: ModelShape, *, tp_size: int = 1, pp_size: int = 1) -> RankLayout:
    """The ranks that will serve; refuses those that the model cannot be split over."""
    return RankLayout.of(shape.geometry, quant.k_layout, quant.v_layout, tp_size=tp_size, pp_size=pp_size)


@dataclass
class Phases:
    """Counts the forward passes over one sequence by phase, partial ones as fractions of their layers.

    Attributes:
        bench: The workbench, with the scale layouts that were chosen.
        folder: The run folder.
        passes: The forward passes by phase.
        seconds: The time by phase.
        layouts: The scale layouts that were compared, by side.
        window_length: The window lengths that were compared, None where the options give one.
        progress: What shows how much of the work ahead is done.
    """

    bench: Workbench
    folder: RunFolder
    passes: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    layouts: tuple[LayoutComparison, ...] = ()
    window_length: LengthComparison | None = None
    progress: ForwardProgress = field(default_factory=ForwardProgress)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time and count one phase."""
        say(f"{name} ...")
        counter, streamed = self.bench.chain.count, streamed_layers_of(self.bench.chain.model)
        loads = 0 if streamed is None else streamed.num_loads
        before, start, processor = counter.layer_tokens, time.monotonic(), time.process_time()
        per_pass = len(self.bench.chain.layers) * self.bench.corpus.splits["calibrate"].shape[1]

        def passes_so_far() -> float:
            return (counter.layer_tokens - before) / per_pass

        with self.progress.phase(name, passes_so_far):
            yield
        passes = passes_so_far()
        self.passes[name] = self.passes.get(name, 0.0) + passes
        seconds = time.monotonic() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        took = {"seconds": round(seconds, 2), "processor_seconds": round(time.process_time() - processor, 2)}
        reads = None if streamed is None else (streamed.num_loads - loads) / len(self.bench.chain.layers)
        self.folder.log(
            "phase", name=name, forward_passes=round(passes, 2), **took,
            **({} if reads is None else {"weight_reads": round(reads, 2)}),
        )  # fmt: skip
        say(f"{name}: {passes:.1f} forward passes, {seconds:.1f} s")


def measure_sensitivity(
    options: CalibrateOptions,
    shape: ModelShape,
    folder: RunFolder,
    *,
    phase: str,
    ahead: Sequence[tuple[str, float]] = (),
) -> tuple[Phases, SensitivityTable]:
    """Load the model and measure it, or go on in the run folder; what it took is the phase of that name.

    The phases ahead, with their forward passes, are those of the whole run.
    """
    data = corpus_source(options.data, options.model, shape, seed=options.measurement.seed)
    measurement = calibration_options(options.measurement, shape)
    if options.data.data is None and options.model.model != DEMO:
        say(
            "no --data given: measuring on the shipped demo corpus (Python sources and generated tables);"
            " prompts like the ones you serve give a better profile"
        )
    if options.measurement.three_bits and not measurement.quant.three_bits:
        say(f"3 bits are not measured: {why_no_three_bits(options.measurement, shape)}")
    selected = num_selected_tokens(shape.config)
    if selected is not None and data.sequence_length <= selected:
        say(
            f"--sequence-length {data.sequence_length} is not above the {selected} tokens that an index selects"
            " (index_topk): attention to all tokens is measured"
        )
    say("loading the model ...")
    loaded = load_model(replace(model_source(options.model), stream=options.stream, ranks=options.tp), shape)
    if options.tp > 1:
        say(f"tensor parallelism: {_share_here(loaded)}")
    corpus = load_corpus(data, loaded.tokenizer, lambda: load_processor(loaded.source))
    bench = Workbench.prepare(loaded, corpus, measurement)
    folder.create()
    phases = Phases(bench, folder, progress=ForwardProgress(ahead))
    _choose_window(options.measurement, phases)
    _choose_layouts(options.measurement, phases)
    with phases.phase(phase):
        return phases, measure_table(phases.bench, folder, say)


def _share_here(loaded: LoadedModel) -> str:
    weights = list(loaded.model.parameters())
    return f"{bytes_here(weights) / 1e9:.2f} of {sum(weight.nbytes for weight in weights) / 1e9:.2f} GB of weights here"


def _choose_window(options: MeasurementOptions, phases: Phases) -> None:
    """Choose the length of the exact window where the options leave it to a measurement, and log the figures."""
    if options.residual_length != "auto":
        return
    undecided = undecided_facts(competing_layouts(options, phases.bench.loaded.shape))
    with phases.phase("window length"):
        comparison = compare_lengths(phases.bench, phases.folder, undecided)
    phases.window_length = comparison
    phases.folder.log("window length", chosen=comparison.chosen, **comparison.figures)
    phases.bench = phases.bench.with_quant(comparison.apply(phases.bench.options.quant))
    say(f"window length: {comparison}")


def _choose_layouts(options: MeasurementOptions, phases: Phases) -> None:
    """Choose the scale layouts that the options leave to a measurement, and log the figures."""
    layouts = competing_layouts(options, phases.bench.loaded.shape)
    if not layouts:
        return
    with phases.phase("scale layouts"):
        phases.layouts = compare_layouts(phases.bench, layouts, phases.folder)
    quant = phases.bench.options.quant
    for comparison in phases.layouts:
        quant = comparison.apply(quant)
        phases.folder.log("scale layout", side=comparison.side, chosen=str(comparison.chosen), **comparison.figures)
    phases.bench = phases.bench.with_quant(quant)
    say(f"scale and minimum: {layouts_text(quant, phases.bench.loaded.shape, phases.layouts)}")


class SearchRun:
    """One search with everything loaded and calibrated, by this process or by its group of ranks."""

    def __init__(
        self, options: SearchOptions, phases: Phases, table: SensitivityTable, group: RankGroup = ALONE
    ) -> None:
        self.options, self.phases, self.table, self.group = options, phases, table, group
        self.layouts, self.window_length = phases.layouts, phases.window_length
        self.bench, self.folder, self.seed = phases.bench, phases.folder, options.measurement.seed
        self.shape = self.bench.loaded.shape
        quant = self.bench.options.quant
        self.rows = row_shape(quant, self.shape)  # of the whole model
        self.ranks = serving_ranks(quant, self.shape, tp_size=options.tp_size, pp_size=options.pp_size)
        self.corpus_source = corpus_source(options.data, options.model, self.shape, seed=self.seed)
        self.kept = kept_pairs(options, self.shape)

    def uniform(self, pair: PrecisionPair, *, transforms: bool) -> Configuration:
        """One pair for all layers, without transforms or with the best ones."""
        return uniform(self.table, pair, self.options.measurement.score, self.rows, transforms=transforms)

    def may_be_uniform(self, pair: PrecisionPair) -> bool:
        """Whether a packed pair may stand in all layers, those that are kept among them."""
        return pair.is_packed and set(self.kept.values()) <= {pair}

    def leave_out(self, what: str, reason: str) -> None:
        """Say, here and in the event log, what has no finite KL and takes no further part."""
        self.folder.log("left out", what=what, reason=reason)
        say(f"{what} is left out: {reason}")
