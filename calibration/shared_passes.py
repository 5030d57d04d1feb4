"""The two passes over all layers, which workers share batch by batch. Knows nothing of isolated KL."""

from __future__ import annotations

import base64
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kvtuner.calibration.forward.parallel_sequences import num_workers, run_sequences
from kvtuner.calibration.transform_statistics import LayerSums, constants_of, sums_of_batch
from kvtuner.journal import Journal
from kvtuner.workers.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.candidate_pass import CandidateMeasurement
    from kvtuner.calibration.forward.chain import DecoderChain
    from kvtuner.calibration.sensitivity import LayerConstants
    from kvtuner.run_folder import RunFolder

STATISTICS: Final = "statistics.jsonl"
CANDIDATES: Final = "candidates.jsonl"


def shared_constants(
    chain: DecoderChain,
    batches: Sequence[Batch],
    folder: RunFolder,
    identity: str,
    on_tokens: Callable[[int], object] = lambda _: None,
) -> dict[int, LayerConstants]:
    """The constants of each tuned layer by its id, as `measure_constants` has them.

    `on_tokens` gets the tokens of each batch that is done.

    Raises:
        NonFiniteActivationError: A layer's keys, values or queries hold NaN or infinity.
    """

    def measure(batch: Batch) -> dict[str, Any]:
        return {"layers": [_encoded(sums) for sums in sums_of_batch(chain, batch)]}

    work = _BatchWork(folder, STATISTICS, identity, chain.model)
    records = work.finish(batches, measure, lambda batch: on_tokens(batch.num_tokens))
    return constants_of(chain.geometry, (list(map(_decoded, record["layers"])) for record in records))


def shared_candidates(
    measurement: CandidateMeasurement,
    batches: Sequence[Batch],
    folder: RunFolder,
    identity: str,
    on_tokens: Callable[[int], object] = lambda _: None,
) -> None:
    """Run an empty measurement over all batches, as its `run` does; `on_tokens` gets those of each layer and batch."""
    told: dict[int, int] = {}

    def tell(batch: Batch, tokens: int) -> None:
        told[batch.index] = told.get(batch.index, 0) + tokens
        on_tokens(tokens)

    def measure(batch: Batch) -> dict[str, Any]:
        return measurement.of_batch(batch, lambda tokens: tell(batch, tokens)).to_record()

    def tell_rest(batch: Batch) -> None:
        on_tokens(batch.num_tokens * measurement.chain.geometry.num_layers - told.get(batch.index, 0))

    work = _BatchWork(folder, CANDIDATES, identity, measurement.chain.model)
    for record in work.finish(batches, measure, tell_rest):
        measurement.merge_record(record)


@dataclass(frozen=True, slots=True)
class _BatchWork:
    """Batches that workers share, a journalled record each."""

    folder: RunFolder
    kind: str
    identity: str
    model: torch.nn.Module

    def finish(
        self,
        batches: Sequence[Batch],
        measure: Callable[[Batch], Mapping[str, Any]],
        on_done: Callable[[Batch], object],
    ) -> list[Mapping[str, Any]]:
        """The records of all batches in their order."""
        journal = Journal(self.folder, self.kind, self.identity, key_of=itemgetter("batch"))

        def measure_all(places: Sequence[int]) -> None:
            taken = [batches[place] for place in places]
            for batch, record in zip(taken, run_sequences(self.model, measure, taken), strict=True):
                journal.append({"batch": batch.index, **record})

        def record_of(place: int) -> Mapping[str, Any] | None:
            return journal.known(batches[place].index)

        WorkQueue[int](
            journal,
            measure=measure_all,
            is_done=lambda place: record_of(place) is not None,
            at_once=num_workers(self.model),
        ).finish(range(len(batches)), on_done=lambda place: on_done(batches[place]))
        return [record for record in map(record_of, range(len(batches))) if record is not None]


def _encoded(sums: LayerSums) -> dict[str, Any]:
    """Sums as JSON values: tensors are base64 of their float64, little-endian, heads first."""
    arrays = {
        name: base64.b64encode(tensor.numpy().astype("<f8").tobytes()).decode()
        for name, tensor in ((field.name, getattr(sums, field.name)) for field in fields(sums))
        if isinstance(tensor, torch.Tensor)
    }
    return {**arrays, "shape": list(sums.key.shape), "num_tokens": sums.num_tokens}


def _decoded(record: Mapping[str, Any]) -> LayerSums:
    arrays = {
        field.name: torch.from_numpy(np.frombuffer(base64.b64decode(record[field.name]), "<f8").copy()).reshape(
            record["shape"]
        )
        for field in fields(LayerSums)
        if field.name != "num_tokens"
    }
    return LayerSums(**arrays, num_tokens=record["num_tokens"])
