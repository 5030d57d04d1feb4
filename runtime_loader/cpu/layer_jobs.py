"""Jobs of decoding and of copies, of which most stays the same from step to step of a layer. Knows no library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from kvtuner.errors import CacheError
from kvtuner.quant import hadamard_block
from kvtuner.runtime_loader.cpu.structures import NUMBERS, CopyJob, DecodeJob, RowsOfSide, Window, side_of_states

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvtuner.runtime_loader.exact_ring import ExactRing
    from kvtuner.runtime_loader.packed_attention import PackedRows, ScoreScaling

STEPS_IN_CPP: Final = ("centered", "balanced", "hadamard")
"""The steps of transforms that the library takes, in their order."""


def in_cpp(stored: PackedRows) -> bool:
    """Whether the library takes all steps of the transform of these rows."""
    return set(stored.transform.kind.steps) <= set(STEPS_IN_CPP)


def steps_of(stored: PackedRows) -> tuple[int, float]:
    """The block of the Hadamard transform of these rows, 1 without one, and the factor of its sums."""
    block = hadamard_block(stored.format.head_dim) if stored.transform.kind.hadamard else 1
    return block, float(block) ** -0.5


def constant_of(stored: PackedRows, name: str, constant: Tensor | None) -> Tensor | None:
    """Mu or lambda of a transform, float32 [num_heads, head_dim], as the library takes them."""
    shape = (stored.format.num_heads, stored.format.head_dim)
    if constant is not None and constant.shape != shape:
        raise CacheError(f"{name} of these rows is {list(shape)}, not {list(constant.shape)}")
    return None if constant is None else constant.float().contiguous()


@dataclass(frozen=True, slots=True)
class _DecodedLayer:
    """What all steps of a layer share: the job, whose rows of values are `values`, and constants that it points to."""

    job: DecodeJob
    values: PackedRows
    mu: Tensor | None
    lam: Tensor | None


class LayerJobs:
    """The jobs of layers, by their rows of keys. `side_of_rows` gives rows as the library reads them."""

    def __init__(self, side_of_rows: Callable[[PackedRows], RowsOfSide]) -> None:
        self._side_of_rows = side_of_rows
        self._layers: WeakKeyDictionary[PackedRows, _DecodedLayer] = WeakKeyDictionary()
        self._windows: WeakKeyDictionary[ExactRing, Window] = WeakKeyDictionary()

    def of_decode(
        self, keys: PackedRows, values: PackedRows, ring: ExactRing | None, q: Tensor, scores: ScoreScaling
    ) -> DecodeJob:
        """A job of queries [requests, num_heads, head_dim], whose tokens, outputs and sinks are yet to be filled in."""
        (num_heads, head_dim), shape = q.shape[1:], keys.format
        if head_dim != shape.head_dim or num_heads % shape.num_heads or shape.num_heads != values.format.num_heads:
            raise CacheError(f"queries {list(q.shape)} do not fit {shape.num_heads} heads of {shape.head_dim} channels")
        if scores.sink_scores is not None and scores.sink_scores.shape != (num_heads,):
            raise CacheError(f"{num_heads} heads have {list(scores.sink_scores.shape)} scores of sinks")
        layer = self._layers.get(keys)
        if layer is None or layer.values is not values:
            layer = self._layers[keys] = self._layer(keys, values)
        job = DecodeJob.from_buffer_copy(layer.job)
        if ring is not None:
            for stored, copies in ((keys, ring.keys), (values, ring.values)):
                if copies.shape[2:] != stored.shape[1:]:
                    raise CacheError(f"copies of {list(copies.shape[2:])} do not fit rows of {list(stored.shape[1:])}")
            job.window = self._window(ring)
        job.q, job.q_stride, job.q_numbers = q.data_ptr(), q.stride(0), NUMBERS[q.dtype]
        job.rows.gqa = num_heads // shape.num_heads
        job.rows.scale, job.rows.logit_cap = scores.scale, scores.logit_cap
        if layer.mu is not None and (ring is not None or scores.logit_cap > 0 or scores.sink_scores is not None):
            job.mu = layer.mu.data_ptr()
        return job

    def of_copies(self, ring: ExactRing, requests: Tensor, bounds: Tensor, k: Tensor, v: Tensor) -> CopyJob:
        """The job that copies the last token of each request from keys and values in the dtype of the copies."""
        job = CopyJob(
            self._window(ring), k.data_ptr(), v.data_ptr(), bounds.data_ptr(), len(requests),
            k.stride(0) * k.itemsize, v.stride(0) * v.itemsize,
        )  # fmt: skip
        job.window.requests = requests.data_ptr()
        return job

    def _window(self, ring: ExactRing) -> Window:
        window = self._windows.get(ring)
        if window is None:
            window = self._windows[ring] = _window_of(ring)
        return window

    def _layer(self, keys: PackedRows, values: PackedRows) -> _DecodedLayer:
        job, transform = DecodeJob(), keys.transform
        job.rows.keys, job.rows.values = self._side_of_rows(keys), self._side_of_rows(values)
        mu, lam = constant_of(keys, "mu", transform.mu), constant_of(keys, "lambda", transform.lam)
        job.lambda_ = None if lam is None else lam.data_ptr()
        job.k_block, job.k_factor = steps_of(keys)
        job.v_block, job.v_factor = steps_of(values)
        return _DecodedLayer(job, values, mu, lam)


def _window_of(ring: ExactRing) -> Window:
    """The copies of a window; the slots of requests are yet to be filled in."""
    k, v = (side_of_states(states.flatten(0, 1), *states.shape[2:]) for states in (ring.keys, ring.values))
    window, positions = ring.window, ring.positions
    if not positions.is_contiguous():
        raise CacheError(f"positions of copies lie side by side, but have strides {positions.stride()}")
    return Window(k, v, positions.data_ptr(), None, *positions.shape, window.residual_length, window.sinks)


def side_by_side(states: Tensor) -> Tensor:
    """States [tokens, heads, channels] in a dtype that the library reads, with the heads of a token side by side."""
    states = states if states.dtype in NUMBERS else states.float()
    return states if states[:1].is_contiguous() else states.contiguous()
