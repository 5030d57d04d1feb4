"""What layers that are not packed read, where SGLang's Triton backend would read else: chunks, and images both ways.

It knows what that backend lists for a batch, and not how a kernel attends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtuner.errors import ServingError
from kvtuner.runtime_loader.packed_attention import ExtendBounds
from kvtuner.runtime_loader.sglang.attention.near_tokens import ChunkPieces, cut_before_windows, tokens_of_last_chunk
from kvtuner.runtime_loader.sglang.compat.attention.triton_backend import list_window_slots
from kvtuner.runtime_loader.sglang.process_state import refusing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvtuner.runtime_loader.sglang.compat.attention.triton_backend import TritonAttnBackend


_WITHOUT_WINDOW: Final = {"sliding_window_size": -1, "window_kv_offsets": None}
"""The options of SGLang's kernel where the slots that it gets say all that is read.

A window would cut once more, by distance, which is none between chunks.
"""
_BY_MASK: Final = {"sliding_window_size": 1 << 30, "skip_prefix_custom_mask": False}
"""The same where a mask says all: it has all prefixes, of which the kernel leaves out what no window reaches.

It does so under a window alone. This one cuts nothing: the kernel's own lets no token of an image read those that are a
window or more after it. By default the kernel reads all of a prefix that it gets, whatever a mask says of it.
"""


class WindowsAndChunks:
    """The reads of layers with a window, or of chunks of `chunk` tokens, in one forward after the other.

    With `owns_masks` no other layer reads masks of images, and windows cut them in their place. Where full layers do,
    as Gemma 3's, images are no longer than windows, and windows of SGLang's kernel cut what masks say.
    """

    def __init__(self, backend: TritonAttnBackend, chunk: int | None, *, owns_masks: bool) -> None:
        self._backend, self._chunk, self._owns_masks = backend, chunk, owns_masks
        self._prefixes: Sequence[int] | None = None
        self._lengths: Sequence[int] | None = None
        self._pieces: ChunkPieces | None = None
        self._is_cut = False

    def begin(self, batch: Any) -> None:
        """List the token slots of chunks for SGLang's ForwardBatch, in the place of windows that SGLang has listed."""
        self._prefixes, self._lengths = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
        self._pieces, self._is_cut = None, False
        if self._chunk is None:
            return
        if batch.forward_mode.is_decode_or_idle():
            ends = batch.seq_lens
            lengths = tokens_of_last_chunk(ends, self._chunk)
        else:
            ends = batch.extend_prefix_lens
            lengths = ends % self._chunk
            self._pieces = ChunkPieces.of(*self._on_the_host(), self._chunk, ends.device)
        metadata = self._backend.forward_metadata
        metadata.window_kv_indptr, metadata.window_kv_indices = list_window_slots(
            self._backend, batch.kv_loc_plan, batch.req_pool_indices, ends, lengths
        )

    def of_graph(self, plan: Any, ends: Tensor, requests: Tensor) -> tuple[Tensor, Tensor] | None:
        """List the slots of chunks for a graph of requests that decode; their bounds and numbers, None for windows."""
        if self._chunk is None:
            return None
        lengths, slots = tokens_of_last_chunk(ends, self._chunk), self._backend.cuda_graph_window_kv_indices
        return list_window_slots(self._backend, plan, requests, ends, lengths, slots)[0], lengths

    def of_extend(self, bounds: ExtendBounds, window: int) -> tuple[ExtendBounds, dict[str, Any]]:
        """What new tokens read in a layer with a window, and the options of SGLang's kernel that say the same.

        Each piece of a chunk attends apart.
        """
        if self._pieces is not None:
            lengths = self._pieces.lengths
            pieces = ExtendBounds(self._pieces.bounds, self._pieces.earlier, bounds.slots, max(lengths))
            return pieces, {**_WITHOUT_WINDOW, "extend_seq_lens_cpu": lengths}
        if bounds.mask is None or not self._owns_masks:
            return bounds, {}
        if not self._is_cut:  # once for all layers
            cut_before_windows(bounds.mask, *self._on_the_host(), window)
            self._is_cut = True
        return bounds, _BY_MASK

    def _on_the_host(self) -> tuple[Sequence[int], Sequence[int]]:
        if self._prefixes is None or self._lengths is None:
            with refusing():
                raise ServingError(
                    "SGLang has the lengths of a batch on the device alone, where nothing is cut by them"
                )
        return self._prefixes, self._lengths
