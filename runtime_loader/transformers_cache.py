"""A transformers cache that keeps every layer at its profile's precision. Knows nothing of the search.

``model.generate(past_key_values=KVTunerCache.from_profile(profile, model.config))`` runs a profile wherever
transformers runs. Rows are packed for real, and each step reads the whole history back in plain torch: this
shows quality and bytes, not speed.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvtuner.errors import CacheError, UnsupportedModelError
from kvtuner.exported_configs.identity.mismatch import Policy, compare_models, refuse
from kvtuner.exported_configs.identity.model_identity import identity_of, is_hub_id, public_name
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import NO_WINDOW, ExactWindow, PrecisionPair
from kvtuner.quant import QuantSpec
from kvtuner.read_plan_names import READ_PLANS, ReadPlanName
from kvtuner.runtime_loader.model_check import calibrated_positions, check_model
from kvtuner.runtime_loader.packed_layer import PackedSide
from kvtuner.runtime_loader.row_format import LayerFormat, RowFormat, rank_formats
from kvtuner.runtime_loader.window_attention import WINDOW_ATTENTION, num_copies, register_window_attention
from kvtuner.supported_models import refuse_other_caches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.exported_configs.profile.records import ModelIdentity
    from kvtuner.geometry import ConfigLike


class KVTunerLayer(CacheLayerMixin):
    """One layer of a `KVTunerCache`: its stored keys `k` and values `v`."""

    # `keys` and `values`, which some code reads off other caches, stay None: nothing may take rows for keys.
    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, layer_format: LayerFormat, window: ExactWindow = NO_WINDOW) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.k = PackedSide(layer_format.k, window)
        self.v = PackedSide(layer_format.v, window)
        self.window = window

    def __repr__(self) -> str:
        spec = self.k.format.spec
        stored = "fp8" if spec is not None and spec.fp8 else PrecisionPair(self.k.format.bits, self.v.format.bits)
        return f"{type(self).__name__}({stored})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Check that the states can be stored, as `PackedSide.check` does; memory is taken when tokens come."""
        self.k.check(key_states)
        self.v.check(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, read_plan: ReadPlanName = "decode",
        num_copies: int = 0, **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Store a chunk and return what its queries read, both [batch, num_kv_heads, tokens, channels].

        Before all tokens come the newest `num_copies` as `PackedSide.extend` gives them. Releases of transformers pass
        more arguments, which are not used. Errors are those of `PackedSide.check`.
        """
        self.lazy_initialization(key_states, value_states)
        is_first = self.get_seq_length() == 0
        exact = read_plan == "hit" or (read_plan == "decode" and is_first)
        keys = self.k.extend(key_states, fresh_is_exact=exact, num_copies=num_copies)
        return keys, self.v.extend(value_states, fresh_is_exact=exact, num_copies=num_copies)

    def copies_read(self, num_queries: int, read_plan: ReadPlanName) -> int:
        """The newest tokens that are given twice, since the next chunk's tokens read different ones exactly.

        There are none for one token, nor for an exact first chunk, which reads nothing but itself.
        """
        is_exact = self.get_seq_length() == 0 and read_plan != "cache"
        if num_queries == 1 or is_exact or not self.window.residual_length:
            return 0
        return num_copies(num_queries, self.window.residual_length)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of what the next `update` returns."""
        return self.get_seq_length() + _count(query_length), 0

    def get_seq_length(self) -> int:
        """The number of stored tokens."""
        return len(self.k.buffer)

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # as early releases of transformers 5 call it

    def reset(self) -> None:
        """Forget everything and free the memory."""
        self.k.clear()
        self.v.clear()
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a negative count."""
        # In early releases of transformers 5 a positive one is the number of tokens to keep.
        rest = max(0, self.get_seq_length() + tokens_to_remove)
        kept = tokens_to_remove if tokens_to_remove > 0 else rest
        self.k.truncate(kept)
        self.v.truncate(kept)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let beam i continue what beam `beam_idx[i]` stored."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences of the batch."""
        self.k.take(indices)
        self.v.take(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch."""
        rows = self.k.buffer.rows
        if rows is not None:
            self.batch_select_indices(torch.arange(rows.shape[0]).repeat_interleave(repeats))


class KVTunerCache(Cache):
    """Packed keys and values of a whole model, with an explicit read plan.

    Read plans say what a chunk of tokens reads; earlier chunks are always read from their rows:
      - ``decode``: the first chunk is exact within itself (a prompt prefilled at once); every later one, of
        one token or many, reads its own tokens quantized too.
      - ``hit``: every chunk is exact within itself, a chunk of one token included.
      - ``cache``: every chunk, the first too, reads its own tokens quantized. Only here does the result not
        depend on where chunks were cut.

    The last and the first tokens of a profile's exact window are also kept as they came, and each token reads those
    that its position has. Chunks of several tokens, but for an exact first one, so need attention that reads keys by
    token: give them within `attending`, or they are refused. After a crop only copies at hand are read, so that a
    result may depend, by any plan, on what was cropped, unless those were of one chunk of at most `MAX_DRAFT_TOKENS`
    tokens and not its first. Sinks are the first tokens stored, padding included.

    16 bits mean the dtype that attention runs in: a bf16 or fp16 model stores exactly
    ``profile.bytes_per_token() * tokens * batch`` bytes; in a float32 model packed sides take as much as that
    and 16-bit sides twice it. Gradients do not flow through stored tokens.

    Attributes:
        num_calibrated_positions: The positions that the means of centred keys were taken over; a longer sequence
            warns once. None if no layer centres or the profile does not say.
    """

    def __init__(self, layers: Sequence[KVTunerLayer], read_plan: ReadPlanName = "decode") -> None:
        super().__init__(layers=[*layers])
        self._read_plan = _checked(read_plan)
        self._is_attended = False
        self.num_calibrated_positions: int | None = None

    @classmethod
    def from_profile(
        cls,
        profile: Profile,
        config: ConfigLike,
        read_plan: ReadPlanName = "decode",
        *,
        context_length: int | None = None,
        allow_derived: bool = False,
    ) -> Self:
        """An empty cache for a model, which is compared with the profile's; warns of what differs without harm.

        It will hold `context_length` tokens, by default as many as the profile was made for; a window that is at least
        as long is none. With `allow_derived` a fine-tune, or another configuration of the same geometry, is no error.

        Raises:
            UnsupportedModelError: A layer's cache is not one key and value per token and head.
            ProfileError: The profile belongs to another model.
            CacheError: The read plan is unknown.
        """
        check_model(profile, config, context_length=context_length)
        policy = Policy(allow_derived=allow_derived, allow_flag="allow_derived=True")
        mismatches = compare_models(profile.model, _identity(config, profile), policy)
        refuse(mismatches)
        for mismatch in mismatches:
            if mismatch.severity == "warning":
                warnings.warn(mismatch.text, stacklevel=2)
        return cls.stored_by(profile, read_plan)

    @classmethod
    def stored_by(cls, profile: Profile, read_plan: ReadPlanName = "decode") -> Self:
        """An empty cache for the model of a profile, which nobody checks."""
        formats = rank_formats(profile, range(len(profile.pairs)))
        cache = cls([KVTunerLayer(layer, profile.window) for layer in formats], read_plan)
        cache.num_calibrated_positions = calibrated_positions(profile) if _is_centered(profile) else None
        return cache

    @classmethod
    def fp8(cls, config: ConfigLike, read_plan: ReadPlanName = "decode", *, context_length: int | None = None) -> Self:
        """An empty cache that stores every layer in e4m3fn with scale 1, as SGLang's fp8 does: what to compare with.

        It will hold `context_length` tokens; all positions of the model by default.

        Raises:
            UnsupportedModelError: A layer's cache is not one key and value per token and head.
            GeometryError: The configuration does not tell its heads.
        """
        refuse_other_caches(config, context_length=context_length)
        geometry = ModelGeometry.from_config(config)
        k, v = (
            RowFormat(geometry.num_kv_heads, dim, QuantSpec(8, fp8=True))
            for dim in (geometry.head_dim, geometry.v_head_dim)
        )
        return cls([KVTunerLayer(LayerFormat(k, v)) for _ in range(geometry.num_layers)], read_plan)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layers={self.layers}, read_plan={self.read_plan!r})"

    @property
    def read_plan(self) -> ReadPlanName:
        """The plan of what the next chunk reads."""
        return self._read_plan

    @contextmanager
    def reading(self, read_plan: ReadPlanName) -> Iterator[Self]:
        """Read by another plan inside the block."""
        before, self._read_plan = self._read_plan, _checked(read_plan)
        try:
            yield self
        finally:
            self._read_plan = before

    @contextmanager
    def attending(self, model: PreTrainedModel) -> Iterator[Self]:
        """Let a model give this cache chunks of several tokens inside the block, beside an exact window too.

        Chunked prefills and assisted generation do. Its attention is `scaled_dot_product_attention` meanwhile; without
        a window it stays what it is.

        Raises:
            UnsupportedModelError: The model does not go through transformers' AttentionInterface.
        """
        if not self.window.residual_length:
            yield self
            return
        before, was_attended = model.config._attn_implementation, self._is_attended
        model.set_attn_implementation(register_window_attention())
        if model.config._attn_implementation != WINDOW_ATTENTION:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not go through transformers' AttentionInterface, so that it cannot read"
                f" {self.window} in a chunk; give one token at a time"
            )
        self._is_attended = True
        try:
            yield self
        finally:
            self._is_attended = was_attended
            model.set_attn_implementation(before)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the rows in use, all layers."""
        return sum(side.buffer.stored_bytes for layer in self._packed_layers for side in (layer.k, layer.v))

    @property
    def window(self) -> ExactWindow:
        """The tokens that are also kept exactly."""
        return self._packed_layers[0].window

    @property
    def window_bytes(self) -> int:
        """Bytes of the exact copies beside the rows, all layers."""
        return sum(side.copies.stored_bytes for layer in self._packed_layers for side in (layer.k, layer.v))

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers, all layers: up to a quarter (or 16 tokens) over the most ever stored."""
        return sum(side.buffer.allocated_bytes for layer in self._packed_layers for side in (layer.k, layer.v))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a chunk of one layer and return what its queries read; see `KVTunerLayer.update`.

        A `CacheError` refuses a chunk of several tokens that read different copies, outside of `attending`.
        """
        layer, tokens = self._packed_layers[layer_idx], key_states.shape[2]
        copies = layer.copies_read(tokens, self.read_plan)
        if copies and not self._is_attended:
            raise CacheError(
                f"the cache keeps {self.window}, which every token counts from itself, but was given a chunk of"
                f" {tokens} tokens after {layer.get_seq_length()} by the read plan {self.read_plan}; give it within"
                ' "with cache.attending(model):", or one token at a time'
            )
        read = layer.update(key_states, value_states, read_plan=self.read_plan, num_copies=copies)
        self._warn_beyond_calibration(layer.get_seq_length())
        return read

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """Length and offset of what the next `update` of a layer returns; the offset counts copies, negative."""
        layer = self._packed_layers[layer_idx]
        copies = layer.copies_read(_count(query_length), self.read_plan) if self._is_attended else 0
        length, _ = layer.get_mask_sizes(query_length)
        return length + copies, -copies

    def _warn_beyond_calibration(self, num_tokens: int) -> None:
        limit = self.num_calibrated_positions
        if limit is not None and num_tokens > limit:
            self.num_calibrated_positions = None
            warnings.warn(
                f"the profile's key means were taken over {limit} positions, but the cache holds {num_tokens}"
                " tokens: accuracy may fall; calibrate with a longer --context-length",
                stacklevel=3,
            )

    @property
    def _packed_layers(self) -> list[KVTunerLayer]:
        return cast("list[KVTunerLayer]", self.layers)


def _identity(config: Any, profile: Profile) -> ModelIdentity:
    """The model that a configuration describes; what it does not know, such as a folder's hub id, is as wanted."""
    loaded_from = str(getattr(config, "_name_or_path", ""))
    name = loaded_from if is_hub_id(public_name(loaded_from)) else profile.model.id
    return identity_of(config, id=name, revision=None, dtype=profile.model.dtype)


def _is_centered(profile: Profile) -> bool:
    specs = [profile.quant_spec(layer_id, "k") for layer_id in range(len(profile.pairs))]
    return any(spec is not None and spec.transform.kind.centered for spec in specs)


def _count(query_length: int | Tensor) -> int:
    # Early releases of transformers 5 give the positions of the queries.
    return query_length.shape[0] if isinstance(query_length, Tensor) else query_length


def _checked(read_plan: ReadPlanName) -> ReadPlanName:
    if read_plan not in READ_PLANS:
        raise CacheError(f"read_plan must be one of {', '.join(READ_PLANS)}, not {read_plan!r}")
    return read_plan
