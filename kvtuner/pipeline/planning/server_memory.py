"""The memory that an SGLang server has for its cache on each GPU, and the tokens that fit there.

Tests compare this with SGLang's own functions and with servers. It knows nothing of layers or schemes, and does not
know what a driver takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtuner.pipeline.planning.state_cost import STATES_SHARE, StateCost
from kvtuner.precision import GIB, MIB
from kvtuner.runtime_loader.exact_ring import LARGEST_COPIES_SHARE, largest_pool, most_requests

_GIB_MIB: Final = 1024


class _GpuClass(NamedTuple):
    """SGLang's defaults for GPUs of less than some memory.

    Attributes:
        below_mib: MiB of memory.
        chunk_tokens: The tokens of a chunk of prefill.
        prefill_graphs: The CUDA graphs of prefill, for chunks of as many sizes.
        decode_graph: The requests of the largest CUDA graph of decoding, below 4 tensor-parallel ranks.
        decode_graph_of_many: The same from 4 ranks on.
    """

    below_mib: float
    chunk_tokens: int
    prefill_graphs: int
    decode_graph: int
    decode_graph_of_many: int


_GPU_CLASSES: Final = (
    _GpuClass(20 * _GIB_MIB, 2048, 42, 8, 8),
    _GpuClass(35 * _GIB_MIB, 4096, 50, 48, 160),
    _GpuClass(60 * _GIB_MIB, 4096, 50, 32, 160),
    _GpuClass(160 * _GIB_MIB, 8192, 58, 256, 512),
    _GpuClass(math.inf, 16384, 74, 512, 512),
)
_MANY_RANKS: Final = 4
_LEAST_SLOTS, _MOST_SLOTS, _SLOTS_OF_CONTEXTS = 2048, 4096, 512


class CacheCost(NamedTuple):
    """The bytes that a scheme takes.

    Attributes:
        bytes_per_token: The bytes of a token on the fullest rank, of its rows, of layers with a window and of indexes.
        bytes_per_request: The bytes of a request slot's exact copies there.
        all_bytes_per_token: The bytes of a token's rows on the ranks of all pipeline stages together.
        all_bytes_per_request: The bytes of a request slot's exact copies there.
        workspace_bytes: The bytes that attention takes beside the cache on a rank.
    """

    bytes_per_token: float
    bytes_per_request: int
    all_bytes_per_token: int
    all_bytes_per_request: int
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """The memory of each GPU of a server with SGLang's default settings.

    Attributes:
        memory_mib: MiB of memory.
        weights_bytes: The bytes of all weights as they are served, of which a rank holds its share.
        tp_size: The tensor-parallel ranks.
        pp_size: The pipeline stages.
        context_length: The tokens that a request may have.
        max_running_requests: The requests that somebody asks for at once, None where SGLang decides.
        states: The states of layers without keys, None where the model has none.
    """

    memory_mib: int
    weights_bytes: int
    context_length: int
    tp_size: int = 1
    pp_size: int = 1
    max_running_requests: int | None = None
    states: StateCost | None = None

    @property
    def reserved_mib(self) -> float:
        """The MiB that SGLang reserves for activations and graphs."""
        # Pipelines prefill without graphs.
        prefill_graphs = self._gpu_class.prefill_graphs if self.pp_size == 1 else 0
        of_ranks = self.tp_size * self.pp_size / 8 * _GIB_MIB
        return 512 + 1.5 * self.chunk_tokens + of_ranks + 2 * self.graph_requests + 8 * prefill_graphs

    @property
    def chunk_tokens(self) -> int:
        """The tokens of a chunk of prefill."""
        return self._gpu_class.chunk_tokens

    @property
    def graph_requests(self) -> int:
        """The requests of the largest CUDA graph of decoding."""
        kind = self._gpu_class
        decode_graph = kind.decode_graph if self.tp_size < _MANY_RANKS else kind.decode_graph_of_many
        return decode_graph if self.max_running_requests is None else min(decode_graph, self.max_running_requests)

    @property
    def _gpu_class(self) -> _GpuClass:
        return next(kind for kind in _GPU_CLASSES if self.memory_mib < kind.below_mib)

    @property
    def static_fraction(self) -> float:
        """The share of the memory that SGLang gives to weights and cache: its --mem-fraction-static."""
        return round((self.memory_mib - self.reserved_mib) / self.memory_mib, 3)

    @property
    def kept_bytes(self) -> int:
        """The bytes that neither weights nor cache have."""
        return self.memory_mib * MIB - self._static_bytes

    @property
    def rank_weights_bytes(self) -> int:
        """The bytes of a rank's weights."""
        return -(-self.weights_bytes // (self.tp_size * self.pp_size))

    @property
    def pool_bytes(self) -> int:
        """The bytes that are left for the cache; not positive where the weights do not fit."""
        return self._static_bytes - self.rank_weights_bytes

    @property
    def num_states(self) -> int:
        """The states that SGLang keeps, beside one that pads batches; 0 where there is no room, or none is needed."""
        if self.states is None:
            return 0
        share = max(self.pool_bytes, 0) * STATES_SHARE / (1 + STATES_SHARE)
        return max(0, int((share - self.states.num_bytes) // self.states.num_bytes))

    @property
    def states_bytes(self) -> int:
        """The bytes of all states on a rank."""
        return 0 if self.states is None else (self.num_states + 1) * self.states.num_bytes

    @property
    def _static_bytes(self) -> int:
        return int(self.memory_mib * self.static_fraction * MIB)

    def request_slots(self, num_tokens: int, cost: CacheCost) -> int:
        """The requests that a server with a pool of so many tokens runs at once."""
        estimate = int(num_tokens / self.context_length * _SLOTS_OF_CONTEXTS)
        asked = self.max_running_requests
        slots = min(max(min(estimate, _MOST_SLOTS), _LEAST_SLOTS) if asked is None else asked, num_tokens // 2)
        slots = self._with_states(slots)
        if asked is not None or not cost.all_bytes_per_request:
            return slots
        return min(slots, most_requests(num_tokens, cost.all_bytes_per_token, cost.all_bytes_per_request))

    def copies_bytes(self, num_tokens: int, cost: CacheCost) -> int:
        """The bytes of all exact copies beside a pool of so many tokens."""
        # One slot more than requests, for tokens that pad a graph.
        return (self.request_slots(num_tokens, cost) + 1) * cost.bytes_per_request

    def tokens(self, cost: CacheCost) -> int:
        """The tokens that fit; 0 where a server would refuse to start, since copies take most of the memory."""
        available = self.pool_bytes - self.states_bytes - cost.workspace_bytes
        if available < cost.bytes_per_token or (self.states is not None and not self.num_states):
            return 0
        num_tokens = largest_pool(available, cost.bytes_per_token, 1, lambda n: self.copies_bytes(n, cost))
        copies = self.copies_bytes(num_tokens, cost) if cost.bytes_per_request else 0
        return 0 if copies > LARGEST_COPIES_SHARE * available else num_tokens

    def requests(self, num_tokens: int, cost: CacheCost) -> int:
        """The requests of the whole context that so many tokens hold; by SGLang's choice, those that it runs."""
        held = self._with_states(num_tokens // self.context_length)
        return held if self.max_running_requests is not None else min(held, self.request_slots(num_tokens, cost))

    def _with_states(self, requests: int) -> int:
        """Those of some requests that states suffice for."""
        return requests if self.states is None else min(requests, self.num_states // self.states.per_request)


def gib(num_bytes: float) -> float:
    """Bytes in GiB."""
    return num_bytes / GIB


def size_text(num_bytes: int) -> str:
    """Bytes in GiB, or in MiB where those are few."""
    return f"{gib(num_bytes):.1f} GiB" if num_bytes >= 100 * MIB else f"{num_bytes / MIB:.1f} MiB"
