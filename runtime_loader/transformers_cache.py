"""A transformers cache that keeps every layer at its profile's precision. Knows nothing of the search.

``model.generate(past_key_values=KVTunerCache.from_profile(profile, model.config))`` runs a profile wherever
transformers runs. Rows are packed for real, and each step reads the whole history back in plain torch: this
shows quality and bytes, not speed.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, cast

from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from kvtuner.errors import CacheError, ServingError, UnsupportedModelError
from kvtuner.quant import QuantSpec
from kvtuner.read_plan_names import READ_PLANS, ReadPlanName
from kvtuner.runtime_loader.model_check import calibrated_positions, check_served_model
from kvtuner.runtime_loader.row_format import LayerFormat, RowFormat, rank_formats
from kvtuner.runtime_loader.rows_in_place import attention_in_place, register_attention_in_place
from kvtuner.runtime_loader.transformers_layer import KVTunerLayer, num_queries_of
from kvtuner.runtime_loader.window_attention import has_sinks, register_window_attention
from kvtuner.supported_models import has_states, layer_kinds, read_cache_geometry, refuse_own_cache

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from kvtuner.exported_configs.profile.profile import Profile
    from kvtuner.geometry import ConfigLike
    from kvtuner.precision import ExactWindow
    from kvtuner.runtime_loader.packed_attention import PackedAttention


class KVTunerCache(Cache):
    """Packed keys and values of a model's full layers, with an explicit read plan; other layers have their own cache.

    A latent is packed as transformers gives it, and expanded by the model once it is read back; its rotary channels
    keep their dtype, as do the keys of an index that selects the tokens to read.

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

    def __init__(self, layers: Sequence[Any], read_plan: ReadPlanName = "decode") -> None:
        super().__init__(layers=[*layers])
        self._read_plan = _checked(read_plan)
        self._is_attended = False
        self._in_place: PackedAttention | None = None
        self._packed_layers = [layer for layer in layers if isinstance(layer, KVTunerLayer)]
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
            UnsupportedModelError: A layer's cache is none that is searched.
            ProfileError: The profile belongs to another model.
            CacheError: The read plan is unknown.
        """
        refuse_own_cache(config)
        for warning in check_served_model(profile, config, context_length=context_length, allow_derived=allow_derived):
            warnings.warn(warning, stacklevel=2)
        return cls.from_profile_unchecked(profile, config, read_plan)

    @classmethod
    def from_profile_unchecked(
        cls, profile: Profile, config: ConfigLike | None = None, read_plan: ReadPlanName = "decode"
    ) -> Self:
        """An empty cache for a model that nobody compares with the profile's; the configuration has other layers."""
        ids = profile.tuned_geometry().ids
        layers = [KVTunerLayer(layer, profile.window) for layer in rank_formats(profile, ids)]
        cache = cls(_among_others(dict(zip(ids, layers, strict=True)), config), read_plan)
        cache.num_calibrated_positions = calibrated_positions(profile) if _is_centered(profile) else None
        return cache

    @classmethod
    def fp8(cls, config: ConfigLike, read_plan: ReadPlanName = "decode", *, context_length: int | None = None) -> Self:
        """An empty cache that stores every layer in e4m3fn with scale 1, as SGLang's fp8 does: what to compare with.

        It will hold `context_length` tokens; all positions of the model by default.

        Raises:
            UnsupportedModelError: A layer's cache is none that is searched.
            GeometryError: The configuration does not tell its heads.
        """
        geometry = read_cache_geometry(config, context_length=context_length).tuned()
        k, v = (
            RowFormat(geometry.num_kv_heads, dim, QuantSpec(8, fp8=True))
            for dim in (geometry.head_dim, geometry.rope_dim if geometry.is_latent else geometry.v_head_dim)
        )
        stored = LayerFormat(k, v, geometry.is_latent)
        return cls(_among_others({i: KVTunerLayer(stored) for i in geometry.ids}, config), read_plan)

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
    def attending(self, model: PreTrainedModel, *, in_place: bool | None = None) -> Iterator[Self]:
        """Let a model read this cache's rows where they lie inside the block, and give it chunks beside a window too.

        Chunked prefills and assisted generation under an exact window need the block. With `in_place` rows are read by
        compiled C++, by default on a processor that can have it. Otherwise they are read back, and attention is
        `scaled_dot_product_attention` under a window and the model's own without.

        Raises:
            UnsupportedModelError: The model does not go through transformers' AttentionInterface.
            ServingError: Rows are to be read in place, and cannot be here, such as beside layers of another kind.
        """
        has_others = len(self._packed_layers) < len(self.layers) or self._packed_layers[0].is_latent
        if has_others or has_sinks(model):
            if in_place:
                raise ServingError(
                    "rows are read in place where all layers are full and have no attention sinks; leave in_place out"
                )
            in_place = False
        reader = attention_in_place(model, self._formats, in_place)
        if reader is None and not self.window.residual_length:
            yield self
            return
        before, previous = model.config._attn_implementation, (self._is_attended, self._in_place)
        wanted = register_window_attention() if reader is None else register_attention_in_place()
        model.set_attn_implementation(wanted)
        if model.config._attn_implementation != wanted:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not go through transformers' AttentionInterface, so that it cannot read"
                f" {self.window} in a chunk; give one token at a time"
            )
        self._is_attended, self._in_place = True, reader
        try:
            yield self
        finally:
            self._is_attended, self._in_place = previous
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
    def index_bytes(self) -> int:
        """Bytes of the keys of indexes beside the rows, all layers."""
        return sum(layer.index_keys.stored_bytes for layer in self._packed_layers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the rows' buffers, all layers: up to a quarter (or 16 tokens) over the most ever stored."""
        return sum(side.buffer.allocated_bytes for layer in self._packed_layers for side in (layer.k, layer.v))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a chunk of one layer and return what its queries read; see `KVTunerLayer.update`.

        A `CacheError` refuses a chunk of several tokens that read different copies, outside of `attending`.
        """
        layer, tokens = self.layers[layer_idx], key_states.shape[2]
        if not isinstance(layer, KVTunerLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._in_place is not None:
            stored = layer.store(self._in_place, key_states, value_states, self.read_plan)
            self._warn_beyond_calibration(layer.get_seq_length())
            return stored
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
        layer = self.layers[layer_idx]
        if isinstance(layer, CacheLayerMixin) and not isinstance(layer, KVTunerLayer):
            return super().get_mask_sizes(cast("int", query_length), layer_idx)
        if not isinstance(layer, KVTunerLayer):  # one without tokens, by which transformers asks for all layers
            layer = self._packed_layers[0]
        reads_back = self._is_attended and self._in_place is None
        copies = layer.copies_read(num_queries_of(query_length), self.read_plan) if reads_back else 0
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
    def _formats(self) -> list[RowFormat]:
        return [side.format for layer in self._packed_layers for side in (layer.k, layer.v)]


def _among_others(packed: Mapping[int, KVTunerLayer], config: ConfigLike | None) -> list[Any]:
    """The layers of a model's cache: those that are packed by their ids, and transformers' own for the others."""
    if list(packed) == list(range(len(packed))) and (config is None or not _has_others(len(packed), config)):
        return list(packed.values())
    assert config is not None, "other layers are those of a configuration"
    own = DynamicCache(config=cast("PreTrainedConfig", config)).layers
    return [_beside(packed[layer_id], layer) if layer_id in packed else layer for layer_id, layer in enumerate(own)]


def _has_others(num_packed: int, config: ConfigLike) -> bool:
    kinds = layer_kinds(config.get_text_config(decoder=True))
    return has_states(config) or len(kinds) not in (1, num_packed)


def _beside(packed: KVTunerLayer, own: Any) -> KVTunerLayer:
    """A packed layer, with the recurrent states that transformers' own has beside its keys."""
    if not hasattr(own, "recurrent_states"):
        return packed
    from kvtuner.runtime_loader.state_layer import KVTunerStateLayer  # early releases of transformers 5 have no base

    return KVTunerStateLayer(packed, own.number_of_states)


def _is_centered(profile: Profile) -> bool:
    specs = [profile.quant_spec(layer_id, "k") for layer_id in profile.tuned_geometry().ids]
    return any(spec is not None and spec.transform.kind.centered for spec in specs)


def _checked(read_plan: ReadPlanName) -> ReadPlanName:
    if read_plan not in READ_PLANS:
        raise CacheError(f"read_plan must be one of {', '.join(READ_PLANS)}, not {read_plan!r}")
    return read_plan
