"""Isolated forward KL: one side of one layer is quantized at one width, everything else is exact.

Every result is journalled as it is measured, so that a killed run repeats at most one forward: that of one candidate
over the sequences that run in parallel. Knows no budgets.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from kvtuner.calibration.forward.continuation import PROMPT_BYTES, run_prompt
from kvtuner.calibration.forward.parallel_sequences import num_workers, run_in_parallel
from kvtuner.calibration.forward.simulator import LayerSpec, quantized_attention
from kvtuner.calibration.kl import KEPT_BYTES, Reference, compare, following
from kvtuner.calibration.sensitivity import Candidate, CandidateScores, LayerConstants
from kvtuner.errors import NonFiniteActivationError
from kvtuner.journal import Journal
from kvtuner.precision import SIDES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.forward.attention_hook import AttentionHook
    from kvtuner.calibration.forward.chain import DecoderChain, Trace
    from kvtuner.calibration.forward.continuation import Prompt
    from kvtuner.calibration.forward.read_plan import ReadPlan
    from kvtuner.calibration.quantization_options import QuantizationOptions
    from kvtuner.run_folder import RunFolder

JOURNAL = "isolated.jsonl"


def isolated_candidates(scores: Mapping[Candidate, CandidateScores]) -> list[Candidate]:
    """All transforms at 2 bits, where the Fisher score is no guide, and the best by Fisher score at more."""
    isolated: list[Candidate] = []
    layers = sorted({candidate.layer for candidate in scores})
    widths = sorted({candidate.bits for candidate in scores})
    for place in product(layers, SIDES, widths):
        alternatives = [c for c in scores if (c.layer, c.side, c.bits) == place]
        best = min(alternatives, key=lambda c: scores[c].fisher)
        isolated.extend(alternatives if best.bits == widths[0] else [best])
    return isolated


def spec_of(candidate: Candidate, constants: Sequence[LayerConstants], options: QuantizationOptions) -> LayerSpec:
    """The storage of the candidate's layer."""
    transform = constants[candidate.layer].transform(candidate.side, candidate.transform)
    spec = options.spec(candidate.side, candidate.bits, transform)
    keys, values = (spec, None) if candidate.side == "k" else (None, spec)
    return LayerSpec(keys, values, options.window)


def measure_isolated(
    chain: DecoderChain,
    batches: Iterable[Batch],
    candidates: Sequence[Candidate],
    constants: Sequence[LayerConstants],
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
    measurement = _Measurement(chain, candidates, constants, plan, options, journal)
    remaining = iter(batches)
    while together := list(islice(remaining, num_workers(chain.model))):
        measurement.add(together, on_forward)
    return {candidate: total / measurement.num_tokens for candidate, total in measurement.totals.items()}


def _key_of(record: Mapping[str, Any]) -> tuple[int, Candidate]:
    return record["batch"], Candidate(record["layer"], record["side"], record["bits"], record["transform"])


@dataclass(frozen=True, slots=True)
class _ExactRun:
    """One batch, run exactly."""

    batch: Batch
    prompt: Prompt
    trace: Trace
    reference: Reference


@dataclass(slots=True)
class _Measurement:
    """The KL of candidates, summed over the scored tokens of batch after batch; `totals` drops what is not finite."""

    chain: DecoderChain
    candidates: Sequence[Candidate]
    constants: Sequence[LayerConstants]
    plan: ReadPlan
    options: QuantizationOptions
    journal: Journal
    totals: dict[Candidate, float] = field(init=False)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.totals = dict.fromkeys(self.candidates, 0.0)

    def add(self, batches: Sequence[Batch], on_forward: Callable[[], None] | None) -> None:
        """Measure all candidates on batches that run together."""
        runs: dict[int, _ExactRun] = {}
        self.num_tokens += sum(len(batch.input_ids) * (batch.input_ids.shape[1] - self.plan.split) for batch in batches)
        for candidate in self.candidates:
            if candidate in self.totals:
                self._measure_missing(candidate, batches, runs)
                self._add_up(candidate, batches)
            if on_forward is not None:
                for _ in batches:
                    on_forward()

    def _measure_missing(self, candidate: Candidate, batches: Sequence[Batch], runs: dict[int, _ExactRun]) -> None:
        """Journal a candidate's KL on the batches that the journal lacks; their exact runs are kept in `runs`."""
        missing = [batch for batch in batches if self.journal.get((batch.index, candidate)) is None]
        for batch in missing:
            if batch.index not in runs:
                prompt_limit = PROMPT_BYTES - sum(run.prompt.num_bytes for run in runs.values())
                runs[batch.index] = self._run_exactly(batch, prompt_limit, KEPT_BYTES // len(batches))
        spec = spec_of(candidate, self.constants, self.options)
        hook = quantized_attention({candidate.layer: spec}, self.plan)

        def kl_sum(batch: Batch) -> float | None:
            return self._kl_sum(runs[batch.index], candidate.layer, hook)

        measured = zip(missing, run_in_parallel(kl_sum, missing, num_workers(self.chain.model)), strict=True)
        self.journal.append(*({**asdict(candidate), "batch": batch.index, "kl_sum": kl} for batch, kl in measured))

    def _run_exactly(self, batch: Batch, prompt_limit: int, kept_limit: int) -> _ExactRun:
        prompt, trace = run_prompt(self.chain, batch, self.plan.split, prompt_limit)
        scored = trace.final[:, self.plan.split - prompt.num_tokens :]
        return _ExactRun(batch, prompt, trace, Reference(self.chain, scored, kept_limit))

    def _kl_sum(self, run: _ExactRun, layer: int, hook: AttentionHook) -> float | None:
        """The KL of a run from `layer` on, with attention by `hook`, summed over scored tokens; None if not finite."""
        final = self.chain.run(run.trace.residual[layer], run.trace.calls, run.prompt.before(hook), start=layer)
        scored = final[:, self.plan.split - run.prompt.num_tokens :]
        next_ids = following(run.batch.input_ids, self.plan.split)
        kl = float(compare(self.chain, run.reference, scored, next_ids).kl.sum())
        return kl if math.isfinite(kl) else None

    def _add_up(self, candidate: Candidate, batches: Sequence[Batch]) -> None:
        """Add a candidate's journalled KL to its total, or drop the candidate where it is not finite."""
        for batch in batches:
            record = self.journal.get((batch.index, candidate))
            assert record is not None
            if record["kl_sum"] is None:
                del self.totals[candidate]
                self._refuse_if_last(candidate)
                return
            self.totals[candidate] += record["kl_sum"]

    def _refuse_if_last(self, candidate: Candidate) -> None:
        """Refuse a model that stays finite under no candidate of this layer, side and width."""
        place = (candidate.layer, candidate.side, candidate.bits)
        if not any((other.layer, other.side, other.bits) == place for other in self.totals):
            side = "keys" if candidate.side == "k" else "values"
            raise NonFiniteActivationError(
                f"layer {candidate.layer}: its {side} at {candidate.bits} bits make the predictions NaN or infinity;"
                " try --dtype float32 or bfloat16, or check the checkpoint"
            )
