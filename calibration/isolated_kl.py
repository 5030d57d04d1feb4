"""Isolated forward KL: one side of one layer is quantized at one width, everything else is exact.

It is measured where Fisher scores, which are local, could be wrong, and on few sequences: it corrects those scores.

Every result is journalled as it is measured, so that a killed run repeats at most one forward: that of one candidate
over the sequences that run in parallel. Knows no budgets.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from kvtuner.calibration.forward.continuation import PROMPT_BYTES, run_prompt
from kvtuner.calibration.forward.parallel_sequences import num_workers, run_sequences
from kvtuner.calibration.forward.simulator import LayerSpec, quantized_attention
from kvtuner.calibration.kl import KEPT_BYTES, Reference, divergence
from kvtuner.calibration.sensitivity import Candidate, CandidateScores, LayerConstants
from kvtuner.calibration.vocabulary_sample import logits_to_compare
from kvtuner.errors import NonFiniteActivationError
from kvtuner.journal import Journal
from kvtuner.precision import SIDES, Side
from kvtuner.workers.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.forward.attention_hook import AttentionHook
    from kvtuner.calibration.forward.chain import DecoderChain
    from kvtuner.calibration.forward.continuation import Prompt
    from kvtuner.calibration.forward.read_plan import ReadPlan
    from kvtuner.calibration.forward.trace import Trace
    from kvtuner.calibration.kl import LogitSource
    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.run_folder import RunFolder

JOURNAL = "isolated.jsonl"


MEASURED_TRANSFORMS: Final = 2
"""The transforms of a layer and side that are measured: those that the Fisher score puts first."""
LARGEST_FISHER_RATIO: Final = 2.5
"""The Fisher score, as a multiple of the least, beyond which a transform is not measured."""
LAYERS_TIMES_SEQUENCES: Final = 48
"""Layers times the sequences that their isolated KL is measured on, so that the forwards grow with depth alone."""
CHANCE: Final = 0.4
"""The logarithm of the factor between KL and Fisher score that is chance on one sequence: 1.5."""


def isolated_sequences(num_layers: int, num_sequences: int) -> int:
    """The sequences that isolated KL is measured on, of those of the calibration."""
    return min(num_sequences, -(-LAYERS_TIMES_SEQUENCES // num_layers))


def isolated_candidates(scores: Mapping[Candidate, CandidateScores]) -> list[Candidate]:
    """The candidates whose isolated KL decides something: at the narrowest width the first few transforms by Fisher.

    Errors are largest there, and the Fisher score is local. Above, it is the KL, see `with_isolated_kl`.
    """
    isolated: list[Candidate] = []
    for (_, _, bits), alternatives in _by_place(scores).items():
        if bits > min(candidate.bits for candidate in scores):
            continue
        most = LARGEST_FISHER_RATIO * scores[alternatives[0]].fisher
        first = alternatives[:MEASURED_TRANSFORMS]
        isolated += [first[0], *(candidate for candidate in first[1:] if scores[candidate].fisher <= most)]
    return isolated


def with_isolated_kl(
    scores: Mapping[Candidate, CandidateScores],
    measured: Mapping[Candidate, float],
    fisher: Mapping[Candidate, float],
    num_sequences: int,
) -> dict[Candidate, CandidateScores]:
    """The scores with a KL for each candidate that was measured, and above for the transform that Fisher puts first.

    The Fisher score is the KL to second order, on all sequences. Of what was measured it is multiplied by the ratio of
    `measured` KL to `fisher` score on the same `num_sequences` sequences, less the factor that chance explains. So KL
    of few sequences tells where the second order is wrong, and no sequence decides by its own difficulty.
    """
    narrowest = min(candidate.bits for candidate in scores)
    chance = CHANCE / math.sqrt(num_sequences)
    kl = {
        alternatives[0]: scores[alternatives[0]].fisher
        for (_, _, bits), alternatives in _by_place(scores).items()
        if bits > narrowest
    }
    for candidate, measured_kl in measured.items():
        kl[candidate] = scores[candidate].fisher * _beyond_chance(measured_kl, fisher[candidate], chance)
    return {candidate: replace(s, kl=kl.get(candidate, s.kl)) for candidate, s in scores.items()}


def _beyond_chance(kl: float, fisher: float, chance: float) -> float:
    """The factor from a Fisher score to a KL, nearer to one by what chance explains, a logarithm; one without error."""
    if kl <= 0 or fisher <= 0:
        return 1.0
    log_ratio = math.log(kl / fisher)
    return math.exp(math.copysign(max(0.0, abs(log_ratio) - chance), log_ratio))


def _by_place(scores: Mapping[Candidate, CandidateScores]) -> dict[tuple[int, Side, int], list[Candidate]]:
    """The candidates of every layer, side and width, in this order, by ascending Fisher score."""
    layers = sorted({candidate.layer for candidate in scores})
    widths = sorted({candidate.bits for candidate in scores})
    sides = [side for side in SIDES if any(candidate.side == side for candidate in scores)]  # a latent stands as keys
    return {
        place: sorted(
            (candidate for candidate in scores if (candidate.layer, candidate.side, candidate.bits) == place),
            key=lambda candidate: scores[candidate].fisher,
        )
        for place in product(layers, sides, widths)
    }


def spec_of(candidate: Candidate, constants: Mapping[int, LayerConstants], options: QuantizationOptions) -> LayerSpec:
    """The storage of the candidate's layer."""
    transform = constants[candidate.layer].transform(candidate.side, candidate.transform)
    spec = options.spec(candidate.side, candidate.bits, transform)
    keys, values = (spec, None) if candidate.side == "k" else (None, spec)
    return LayerSpec(keys, values, options.window)


def measure_isolated(
    chain: DecoderChain,
    batches: Iterable[Batch],
    candidates: Sequence[Candidate],
    constants: Mapping[int, LayerConstants],
    *,
    plan: ReadPlan,
    options: QuantizationOptions,
    folder: RunFolder,
    identity: str,
    on_forward: Callable[[], None] | None = None,
) -> dict[Candidate, float]:
    """Mean KL per scored token of every candidate whose KL is finite, nats.

    Each candidate's forward starts at its own layer, from the exact residual stream of the tokens after the prompt.
    Journal lines of another `identity`, the hash of all that decides the measurement, are not used. `on_forward` is
    called after each forward, run now or read from the journal.

    Raises:
        NonFiniteActivationError: All candidates of one width of one side of a layer drive the model to NaN or
            infinity.
    """
    journal = Journal(folder, JOURNAL, identity, key_of=_key_of)
    measurement = _Measurement(chain, list(batches), candidates, constants, plan, options, journal, on_forward)
    queue = WorkQueue[_Item](
        folder,
        JOURNAL,
        identity,
        refresh=measurement.refresh,
        is_done=measurement.is_done,
        measure=measurement.measure,
        group_of=lambda item: item[0],
        held_groups=measurement.runs,
        at_once=num_workers(chain.model),
    )
    queue.finish(measurement.items(), on_done=measurement.tell)
    return measurement.mean_kl()


def _key_of(record: Mapping[str, Any]) -> tuple[int, Candidate]:
    return record["batch"], Candidate(record["layer"], record["side"], record["bits"], record["transform"])


@dataclass(frozen=True, slots=True)
class _ExactRun:
    """One batch, run exactly.

    Attributes:
        head: The logits over which others are compared with the reference.
    """

    batch: Batch
    prompt: Prompt
    trace: Trace
    head: LogitSource
    reference: Reference


_Item = tuple[int, int]
"""A batch, by its place, and a layer: all candidates of the layer on that batch."""


@dataclass(slots=True)
class _Measurement:
    """The KL of candidates on every batch, summed over scored tokens, in a journal.

    Attributes:
        runs: The exact runs at hand, by batch.
    """

    chain: DecoderChain
    batches: Sequence[Batch]
    candidates: Sequence[Candidate]
    constants: Mapping[int, LayerConstants]
    plan: ReadPlan
    options: QuantizationOptions
    journal: Journal
    on_forward: Callable[[], None] | None
    runs: dict[int, _ExactRun] = field(default_factory=dict)
    _broken: set[Candidate] = field(default_factory=set)
    _told: set[tuple[int, Candidate]] = field(default_factory=set)

    def items(self) -> list[_Item]:
        """All items, batch by batch."""
        layers = sorted({candidate.layer for candidate in self.candidates})
        return [(place, layer) for place in range(len(self.batches)) for layer in layers]

    def candidates_of(self, layer: int) -> list[Candidate]:
        """The candidates of a layer."""
        return [candidate for candidate in self.candidates if candidate.layer == layer]

    def refresh(self) -> None:
        """Read what was journalled since."""
        self.journal.refresh()
        places = range(len(self.batches))
        for candidate in self.candidates:
            records = (self._record(place, candidate) for place in places)
            if any(record is not None and record["kl_sum"] is None for record in records):
                self._broken.add(candidate)

    def is_done(self, item: _Item) -> bool:
        """Whether the journal has all candidates of an item, but those that it need not have."""
        return not self._missing(item)

    def tell(self, item: _Item) -> None:
        """Tell of the forwards of an item that were not told of yet."""
        place, layer = item
        for candidate in self.candidates_of(layer):
            self._tell(place, candidate)

    def _tell(self, place: int, candidate: Candidate) -> None:
        if (place, candidate) not in self._told:
            self._told.add((place, candidate))
            if self.on_forward is not None:
                self.on_forward()

    def measure(self, items: Sequence[_Item]) -> None:
        """Measure and journal what the journal lacks of some items."""
        for place in [place for place in self.runs if place not in {place for place, _ in items}]:
            del self.runs[place]
        places = [place for place in dict.fromkeys(place for place, _ in items) if place not in self.runs]
        limit = KEPT_BYTES // len(items)
        runs = run_sequences(self.chain.model, lambda place: self._run_exactly(self.batches[place], limit), places)
        self.runs.update(zip(places, runs, strict=True))
        missing = [(place, candidate) for place, layer in items for candidate in self._missing((place, layer))]

        def kl_sum(work: tuple[int, Candidate]) -> float | None:
            place, candidate = work
            spec = spec_of(candidate, self.constants, self.options)
            hook = quantized_attention({candidate.layer: spec}, self.batches[place].own_plan(self.plan))
            return self._kl_sum(self.runs[place], candidate.layer, hook)

        at_once = num_workers(self.chain.model)
        for first in range(0, len(missing), at_once):
            together = missing[first : first + at_once]
            measured = zip(together, run_sequences(self.chain.model, kl_sum, together), strict=True)
            self.journal.append(
                *({**asdict(c), "batch": self.batches[place].index, "kl_sum": kl} for (place, c), kl in measured)
            )
            for place, candidate in together:
                self._tell(place, candidate)

    def _missing(self, item: _Item) -> list[Candidate]:
        """The candidates of an item that the journal lacks, but those that are not finite on another batch."""
        place, layer = item
        return [
            candidate
            for candidate in self.candidates_of(layer)
            if candidate not in self._broken and self._record(place, candidate) is None
        ]

    def _record(self, place: int, candidate: Candidate) -> Mapping[str, Any] | None:
        return self.journal.known((self.batches[place].index, candidate))

    def _run_exactly(self, batch: Batch, kept_limit: int) -> _ExactRun:
        prompt, trace = run_prompt(self.chain, batch, self.plan.split, PROMPT_BYTES)
        scored = batch.scored(trace.final, self.plan)
        head = logits_to_compare(self.chain, scored, batch.index)
        return _ExactRun(batch, prompt, trace, head, Reference(head, scored, kept_limit))

    def _kl_sum(self, run: _ExactRun, layer: int, hook: AttentionHook) -> float | None:
        """The KL of a run from `layer` on, with attention by `hook`, summed over scored tokens; None if not finite."""
        final = self.chain.run(run.trace.residual[layer], run.trace.calls, run.prompt.before(hook), start=layer)
        scored = run.batch.scored(final, self.plan)
        kl = float(divergence(run.head, run.reference, scored).sum())
        return kl if math.isfinite(kl) else None

    def mean_kl(self) -> dict[Candidate, float]:
        """The mean KL per scored token of every candidate whose KL is finite, summed batch by batch."""
        num_tokens = sum(len(batch.input_ids) * len(batch.scored_places(self.plan)) for batch in self.batches)
        finite = [candidate for candidate in self.candidates if candidate not in self._broken]
        self._refuse_place_without(finite)
        means = {}
        for candidate in finite:
            records = [self._record(place, candidate) for place in range(len(self.batches))]
            means[candidate] = sum(record["kl_sum"] for record in records if record is not None) / num_tokens
        return means

    def _refuse_place_without(self, finite: Sequence[Candidate]) -> None:
        """Refuse a model that stays finite under no candidate of a layer, side and width."""
        left = {(candidate.layer, candidate.side, candidate.bits) for candidate in finite}
        for candidate in self.candidates:
            if (candidate.layer, candidate.side, candidate.bits) not in left:
                side = "keys" if candidate.side == "k" else "values"
                raise NonFiniteActivationError(
                    f"layer {candidate.layer}: its {side} at {candidate.bits} bits make the predictions NaN or"
                    " infinity; try --dtype float32 or bfloat16, or check the checkpoint"
                )
