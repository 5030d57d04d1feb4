"""Isolated forward KL: one side of one layer is quantized at one width, everything else is exact.

Which candidates have one, and on how many sequences, is for `kvtuner.calibration.isolated.candidates`.

Every result is journalled as it is measured, so that a killed run repeats at most one forward: that of one candidate
over the sequences that run in parallel. Knows no budgets.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvtuner.calibration.forward.continuation import PROMPT_BYTES, run_prompt
from kvtuner.calibration.forward.parallel_sequences import num_workers, run_sequences
from kvtuner.calibration.forward.simulator import LayerSpec, quantized_attention
from kvtuner.calibration.isolated.candidates import place_of, stages
from kvtuner.calibration.kl import KEPT_BYTES, Reference, divergence
from kvtuner.calibration.sensitivity import Candidate, LayerConstants
from kvtuner.calibration.vocabulary_sample import logits_to_compare
from kvtuner.errors import NonFiniteActivationError
from kvtuner.journal import Journal
from kvtuner.workers.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

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
    losers_of: Callable[[Mapping[Candidate, float], int], Collection[Candidate]] | None = None,
) -> dict[Candidate, float]:
    """Mean KL per scored token of every candidate whose KL is finite, nats.

    Each candidate's forward starts at its own layer, from the exact residual stream of the tokens after the prompt.
    Journal lines of another `identity`, the hash of all that decides the measurement, are not used. `on_forward` is
    called once for each candidate and batch: after its forward, run now or read from the journal, or once it is clear
    that there will be none.

    `losers_of` gets the means of all candidates that are left on the first batches, and the number of these batches:
    one, two, four and so on. Those that it names are measured on no more, unless no other one of the layer, side and
    width stays finite. Their mean is that of the batches that they were measured on.

    Raises:
        NonFiniteActivationError: All candidates of one width of one side of a layer drive the model to NaN or
            infinity.
    """
    journal = Journal(folder, JOURNAL, identity, key_of=_key_of)
    measurement = _Measurement(chain, list(batches), candidates, constants, plan, options, journal, on_forward)
    queue = WorkQueue[_Item](
        journal,
        measure=measurement.measure,
        refresh=measurement.refresh,
        is_done=measurement.is_done,
        group_of=lambda item: item[0],
        held_groups=measurement.runs,
        at_once=num_workers(chain.model),
    )
    num_batches = len(measurement.batches)
    for count in [num_batches] if losers_of is None else stages(num_batches):
        queue.finish(measurement.items(count), on_done=measurement.tell)
        while measurement.readmit(count):
            queue.finish(measurement.items(count), on_done=measurement.tell)
        means = measurement.mean_kl(count)
        if losers_of is not None:
            left = {candidate: kl for candidate, kl in means.items() if candidate not in measurement.stopped}
            measurement.stop(losers_of(left, count), count)
    return means


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
        stopped: The number of batches of every candidate that is not measured on all of them.
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
    stopped: dict[Candidate, int] = field(default_factory=dict)
    _broken: dict[Candidate, int] = field(default_factory=dict)  # the first batch on which it is not finite
    _told: set[tuple[int, Candidate]] = field(default_factory=set)

    def items(self, num_batches: int) -> list[_Item]:
        """All items of the first batches, batch by batch."""
        layers = sorted({candidate.layer for candidate in self.candidates})
        return [(place, layer) for place in range(num_batches) for layer in layers]

    def stop(self, candidates: Iterable[Candidate], num_batches: int) -> None:
        """Measure some candidates on no more than so many batches."""
        for candidate in candidates:
            self.stopped.setdefault(candidate, num_batches)
            for place in range(num_batches, len(self.batches)):
                self._tell(place, candidate)

    def readmit(self, num_batches: int) -> bool:
        """Whether some go on that were stopped, as no other candidate of their place is finite on the first batches."""
        finite = self._finite(num_batches)
        left = {place_of(candidate) for candidate in finite if candidate not in self.stopped}
        again = [candidate for candidate in finite if place_of(candidate) not in left]
        for candidate in again:
            del self.stopped[candidate]
        return bool(again)

    def candidates_of(self, layer: int) -> list[Candidate]:
        """The candidates of a layer."""
        return [candidate for candidate in self.candidates if candidate.layer == layer]

    def refresh(self) -> None:
        """Read what was journalled since."""
        self.journal.refresh()
        for candidate in self.candidates:
            for place in range(len(self.batches)):
                record = self._record(place, candidate)
                if record is not None and record["kl_sum"] is None:
                    self._broken[candidate] = place
                    break

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
        """The candidates of an item that the journal lacks, but those stopped, or not finite on an earlier batch."""
        place, layer = item
        return [
            candidate
            for candidate in self.candidates_of(layer)
            if place < min(of.get(candidate, len(self.batches)) for of in (self._broken, self.stopped))
            and self._record(place, candidate) is None
        ]

    def _finite(self, num_batches: int) -> list[Candidate]:
        """The candidates that are finite on the first batches, as far as they were measured."""
        return [candidate for candidate in self.candidates if self._broken.get(candidate, num_batches) >= num_batches]

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

    def mean_kl(self, num_batches: int) -> dict[Candidate, float]:
        """The mean KL per scored token of every candidate that is finite on the first batches, summed batch by batch.

        Of a candidate that was stopped it is the mean until then.
        """
        tokens = [len(batch.input_ids) * len(batch.scored_places(self.plan)) for batch in self.batches]
        finite = self._finite(num_batches)
        self._refuse_place_without(finite)
        means = {}
        for candidate in finite:
            count = min(num_batches, self.stopped.get(candidate, num_batches))
            records = [self.journal.record((batch.index, candidate)) for batch in self.batches[:count]]
            means[candidate] = sum(record["kl_sum"] for record in records) / sum(tokens[:count])
        return means

    def _refuse_place_without(self, finite: Sequence[Candidate]) -> None:
        """Refuse a model that stays finite under no candidate of a layer, side and width."""
        left = {place_of(candidate) for candidate in finite}
        for candidate in self.candidates:
            if place_of(candidate) not in left:
                side = "keys" if candidate.side == "k" else "values"
                raise NonFiniteActivationError(
                    f"layer {candidate.layer}: its {side} at {candidate.bits} bits make the predictions NaN or"
                    " infinity; try --dtype float32 or bfloat16, or check the checkpoint"
                )
