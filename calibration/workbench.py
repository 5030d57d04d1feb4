"""Measures the sensitivity table of a model on a corpus, resumably. Knows nothing of budgets or search."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvtuner.calibration.batches import Batch, Offsets, batches
from kvtuner.calibration.candidate_pass import CandidateMeasurement
from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.forward.simulator import Simulator
from kvtuner.calibration.images.image_check import check_images
from kvtuner.calibration.isolated.candidates import (
    CandidateRace,
    isolated_candidates,
    isolated_sequences,
    with_isolated_kl,
)
from kvtuner.calibration.isolated.forwards import measure_isolated
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.calibration.sensitivity import TABLE_FILE, ScoreName, SensitivityTable, missing_candidates
from kvtuner.calibration.shared_passes import shared_candidates, shared_constants
from kvtuner.errors import CorpusError
from kvtuner.precision import LAYOUT_ID, NO_WINDOW, SIDES, WIDE_WORD_BITS
from kvtuner.progress.bar import ProgressBar
from kvtuner.run_folder import RunFolder, refuse_difference, sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvtuner.calibration.corpus import Corpus, SplitName
    from kvtuner.calibration.model_loading import LoadedModel, ModelSource
    from kvtuner.calibration.sensitivity import Candidate, LayerConstants
    from kvtuner.read_plan_names import ReadPlanName

IDENTITY_FILE = "run.json"
MEASUREMENT = 9
"""The version of the measurement; increase it when the same model, data and options would give other numbers."""
_SPLIT_SEEDS: dict[SplitName, int] = {"calibrate": 11, "select": 12, "report": 13}


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """The settings of a measurement of sensitivity.

    Attributes:
        read_plan: The read plan: which tokens read quantized keys and values.
        score: The score that bits are allocated by; decides whether isolated KL is measured.
        num_draws: sampled labels per token of the Fisher score.
        batch_size: sequences in flight.
        with_pairs: Whether to measure also the paper's e_o of K/V pairs.
        seed: The seed of position offsets and sampled labels.
    """

    read_plan: ReadPlanName = "decode"
    score: ScoreName = "kl"
    num_draws: int = 4
    batch_size: int = 1
    quant: QuantizationOptions = field(default_factory=QuantizationOptions)
    with_pairs: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Workbench:
    """A loaded model with its corpus: what calibration, search and validation measure on.

    Attributes:
        weights_sha256: The hash of the weights, computed once: it reads all of them.
    """

    loaded: LoadedModel
    chain: DecoderChain
    corpus: Corpus
    options: CalibrationOptions
    weights_sha256: str

    @classmethod
    def prepare(cls, loaded: LoadedModel, corpus: Corpus, options: CalibrationOptions) -> Workbench:
        """Find the model's chain of layers.

        Raises:
            CorpusError: Tokens that the model has no embedding of, or images that cannot run as the options say.
            UnsupportedModelError: It has no such chain.
        """
        _refuse_unknown_tokens(loaded, corpus)
        if corpus.images:
            _refuse_images(loaded.source, options)
        chain = DecoderChain(loaded.model, loaded.shape.cache)
        bench = cls(loaded, chain, corpus, options, loaded.weights_sha256)
        for batch in bench.batches("calibrate"):
            if batch.images is not None and batch.images.spans:
                check_images(chain, batch, batch.images)
                break
        return bench

    @property
    def plan(self) -> ReadPlan:
        """The read plan with its split."""
        return ReadPlan.of(self.options.read_plan, self.corpus.splits["calibrate"].shape[1])

    def batches(self, split: SplitName, offsets: Offsets = "random") -> Iterator[Batch]:
        """Batches of a split, the same each time."""
        return batches(
            self.corpus.splits[split],
            self.loaded.shape.context_length,
            offsets=offsets,
            seed=self.options.seed * 1000 + _SPLIT_SEEDS[split],
            batch_size=self.options.batch_size,
            device=self.chain.input_device,
            images=self.corpus.images.get(split, ()),
        )

    def simulator(self, split: SplitName, offsets: Offsets = "random", *, reuse: bool = False) -> Simulator:
        """A simulator over a split; `reuse` for many configurations that are alike.

        Where the vocabulary is large, the KL is an estimate on the splits that decide, which have no other scores then.
        """
        batches, estimates = self.batches(split, offsets), split != "report"
        return Simulator(self.chain, batches, self.plan, reuse=reuse, estimates=estimates)

    def with_quant(self, quant: QuantizationOptions) -> Workbench:
        """The same model and corpus under other settings of all candidates."""
        return replace(self, options=replace(self.options, quant=quant))

    def constants(
        self, folder: RunFolder, on_tokens: Callable[[int], object] = lambda _: None
    ) -> dict[int, LayerConstants]:
        """Each layer's constants on the calibrate split, measured with other workers of the folder; see `constants_of`.

        They are the same under all settings of the quantizer, so none measures them again.
        """
        facts = ("model_config", "dtype", "model_weights", "context_length", "sequence_length", "calibrate_tokens")
        identity = self.identity()
        key = sha256_of([identity[fact] for fact in (*facts, "batch_size", "seed", "measurement")])
        return shared_constants(self.chain, list(self.batches("calibrate")), folder, key, on_tokens)

    def identity(self) -> dict[str, Any]:
        """The facts that decide every measurement; a run folder is bound to them."""
        loaded, options = self.loaded, self.options
        hashes = self.corpus.hashes()
        return {
            "model_config": loaded.shape.settings_sha256,
            "dtype": loaded.dtype_name,  # before the weights: the first field that differs is the one named
            "model_weights": self.weights_sha256,
            "context_length": loaded.shape.context_length,
            "sequence_length": self.corpus.splits["calibrate"].shape[1],
            "calibrate_tokens": hashes["calibrate"],
            "select_tokens": hashes["select"],
            "report_tokens": hashes["report"],
            "read_plan": options.read_plan,
            "num_draws": options.num_draws,
            "batch_size": options.batch_size,
            **{f"{side}_group_size": options.quant.layout(side).group_size for side in SIDES},
            "symmetric": options.quant.symmetric,
            # Absent where it is what every measurement had before there was a choice.
            **({} if options.quant.fit == "minmax" else {"fit": options.quant.fit}),
            **({} if options.quant.window == NO_WINDOW else asdict(options.quant.window)),
            **({"three_bits": True} if options.quant.three_bits else {}),
            **({} if options.quant.transforms == "all" else {"transforms": options.quant.transforms}),
            **{
                f"{side}_word_bits": options.quant.layout(side).word_bits
                for side in SIDES
                if options.quant.layout(side).word_bits != WIDE_WORD_BITS
            },
            "seed": options.seed,
            "layout": LAYOUT_ID,
            "measurement": MEASUREMENT,
        }


def _refuse_unknown_tokens(loaded: LoadedModel, corpus: Corpus) -> None:
    rows = next(iter(loaded.model.get_input_embeddings().parameters())).shape[0]
    largest = max(int(ids[~corpus.in_images(name)].max()) for name, ids in corpus.splits.items())
    if largest >= rows:
        raise CorpusError(
            f"token ids must be below the {rows} embedding rows of {loaded.source.name}, but its tokenizer gives"
            f" {largest}; use the tokenizer that belongs to the model, or resize the model's embeddings to it"
        )


def _refuse_images(source: ModelSource, options: CalibrationOptions) -> None:
    """Refuse what runs on text alone, by its flag."""
    flags = {"--stream": source.stream, "--tp": source.ranks > 1, "--batch-size": options.batch_size > 1}
    for flag, is_given in flags.items():
        if is_given:
            raise CorpusError(f"{flag} runs on text alone, but the data holds images; leave it out, or give text")


def measure_table(
    bench: Workbench, folder: RunFolder, on_left_out: Callable[[str], None] | None = None
) -> SensitivityTable:
    """Measure the table, or read what an earlier run measured of it in `folder`.

    `on_left_out` is called with a line about every candidate whose isolated KL is not finite.

    Raises:
        RunFolderError: The folder belongs to another model, data or settings, or is damaged.
        NonFiniteActivationError: NaN or infinity in a layer, or under all candidates of one of its widths.
    """
    identity = bench.identity()
    folder.check_identity(IDENTITY_FILE, identity, "measurements")
    table = SensitivityTable.load(folder) if folder.has(TABLE_FILE) else None
    if table is not None:
        refuse_difference(table.identity, identity, f"{folder.file(TABLE_FILE)} was measured on something else")
    if table is None or (bench.options.with_pairs and not table.pairs):
        table = _measure_candidates(bench, folder, identity)
        table.save(folder)
    if bench.options.score == "kl" and any(missing_candidates(table, "kl")):
        table = _measure_isolated(bench, folder, table, on_left_out)
        table.save(folder)
    return table


def _measure_candidates(bench: Workbench, folder: RunFolder, identity: dict[str, Any]) -> SensitivityTable:
    tokens, options = bench.corpus.splits["calibrate"].numel(), bench.options
    folder.log("statistics", tokens=tokens)
    batches = list(bench.batches("calibrate"))
    with ProgressBar(desc="statistics", total=tokens, unit="tok") as bar:
        constants = bench.constants(folder, bar.update)
    folder.log("candidates", tokens=tokens, draws=options.num_draws)
    layers = bench.loaded.shape.geometry.num_layers
    with ProgressBar(desc="candidates", total=tokens * layers, unit="tok", unit_scale=True) as bar:
        measurement = _candidates_of(bench, batches, folder, constants, options.with_pairs, bar.update)
    return SensitivityTable(
        identity=identity,
        geometry=bench.loaded.shape.geometry,
        constants=constants,
        scores=measurement.scores(),
        pairs=measurement.pairs(),
        info={"calibrate_tokens": tokens, "split_tokens": bench.plan.split},
    )


def _candidates_of(
    bench: Workbench,
    batches: Sequence[Batch],
    folder: RunFolder,
    constants: Mapping[int, LayerConstants],
    with_pairs: bool,
    on_tokens: Callable[[int], object] = lambda _: None,
) -> CandidateMeasurement:
    """The measurement of all candidates on some batches, or what an earlier one journalled of it."""
    options = bench.options
    measurement = CandidateMeasurement(
        bench.chain, constants, bench.plan, options.quant, options.num_draws, options.seed, with_pairs
    )
    key = sha256_of([sha256_of(bench.identity()), with_pairs])
    shared_candidates(measurement, batches, folder, key, on_tokens)
    return measurement


def _measure_isolated(
    bench: Workbench, folder: RunFolder, table: SensitivityTable, on_left_out: Callable[[str], None] | None
) -> SensitivityTable:
    candidates = isolated_candidates(table.scores)
    most = isolated_sequences(table.geometry.num_layers, bench.corpus.splits["calibrate"].shape[0])
    batches = list(islice(bench.batches("calibrate"), -(-most // bench.options.batch_size)))
    folder.log("isolated", candidates=len(candidates), batches=len(batches))

    def fisher_of(num_batches: int) -> tuple[dict[Candidate, float], int]:
        same = _candidates_of(bench, batches[:num_batches], folder, table.constants, bool(table.pairs))
        return {candidate: scores.fisher for candidate, scores in same.scores().items()}, same.num_sequences

    race = CandidateRace(table.scores, fisher_of, sum(len(batch.input_ids) for batch in batches))
    with ProgressBar(desc="isolated KL", total=len(candidates) * len(batches), unit="fwd") as bar:
        finite = measure_isolated(
            bench.chain,
            batches,
            candidates,
            table.constants,
            plan=bench.plan,
            options=bench.options.quant,
            folder=folder,
            identity=sha256_of(table.identity),
            on_forward=bar.update,
            losers_of=race.losers,
        )
    for candidate in candidates:
        if candidate not in finite:
            reason = "its isolated KL is not finite"
            folder.log("left out", **asdict(candidate), reason=reason)
            if on_left_out is not None:
                place = f"layer {candidate.layer} {candidate.side}{candidate.bits}"
                on_left_out(f"{place} with transform {candidate.transform} is left out: {reason}")
    measured = {candidate: race.measured[candidate] for candidate in finite}
    return replace(table, scores=with_isolated_kl(table.scores, measured))
