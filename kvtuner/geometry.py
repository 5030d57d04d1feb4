"""The shape of a model's KV cache, read from its transformers configuration. Knows nothing of weights or budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from kvtuner.errors import GeometryError, PrecisionError
from kvtuner.layer_ranges import write_layers
from kvtuner.precision import WHOLE_HEADS, PrecisionPair, RowShape, ScaleLayout, Side, bytes_per_token


class ConfigLike(Protocol):
    """The part of a `transformers.PretrainedConfig` that is read here."""

    def get_text_config(self, decoder: bool = ...) -> Any:
        """The configuration of the language model inside a multi-modal one."""
        ...


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The layers that own a KV cache, the heads of the whole model, and the channels of a key head and a value head.

    The last `num_shared_layers` of a model read an earlier layer's cache and store nothing. Of a model with other
    layers too, these are the layers that are alike and read all tokens. A latent is one KV head without values.

    Attributes:
        layer_ids: The global ids of the layers; None where they are all layers of the model, from 0 on.
        rope_dim: The rotary channels beside a latent.
    """

    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    num_shared_layers: int = 0
    layer_ids: tuple[int, ...] | None = None
    rope_dim: int = 0

    def __post_init__(self) -> None:
        assert self.layer_ids is None or len(self.layer_ids) == self.num_layers
        assert self.is_latent or not self.rope_dim
        may_be_zero = ("num_shared_layers", "rope_dim", *(("v_head_dim",) if self.num_kv_heads == 1 else ()))
        for name, value in self.counts().items():
            if value < (0 if name in may_be_zero else 1):
                raise GeometryError(f"{name} must be positive, but is {value}")
        if self.num_attention_heads % self.num_kv_heads:
            raise GeometryError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )

    @classmethod
    def from_config(cls, config: ConfigLike) -> ModelGeometry:
        """Read the geometry of a transformers configuration.

        Raises:
            GeometryError: The configuration lacks a count, or heads differ from layer to layer.
        """
        text = config.get_text_config(decoder=True)
        num_layers = read_num_layers(text)
        shared = _optional(text, "num_kv_shared_layers") or 0
        return cls(num_layers - shared, *read_heads(text), shared)

    @property
    def is_latent(self) -> bool:
        """Whether a layer caches a latent, which is read as keys and as values."""
        return self.v_head_dim == 0

    @property
    def channels(self) -> dict[Side, int]:
        """The channels of a head of each side whose precision is chosen; a latent's stands as keys."""
        keys: dict[Side, int] = {"k": self.head_dim}
        return keys if self.is_latent else {**keys, "v": self.v_head_dim}

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides whose precision is chosen."""
        return tuple(self.channels)

    def widths(self, pair: PrecisionPair) -> dict[Side, int]:
        """The width of each side in a layer of a pair; a `PrecisionError` where a latent is given two."""
        if self.is_latent and pair.k_bits != pair.v_bits:
            raise PrecisionError(
                f"a latent is read as keys and as values and has one width, not {pair}; give {pair.k_bits} or"
                f" {pair.v_bits}"
            )
        return {side: pair.k_bits if side == "k" else pair.v_bits for side in self.sides}

    def kv_heads_of_rank(self, tp_rank: int, tp_size: int) -> range:
        """The KV heads that one tensor-parallel rank stores; see the function of that name."""
        return kv_heads_of_rank(self.num_kv_heads, tp_rank, tp_size)

    @property
    def ids(self) -> tuple[int, ...]:
        """The global ids of the layers, ascending."""
        return tuple(range(self.num_layers)) if self.layer_ids is None else self.layer_ids

    def difference(self, other: ModelGeometry) -> str | None:
        """The first difference from a model's geometry, such as ``head_dim 64, but this model has 128``."""
        actual = {**other.counts(), "full layers": write_layers(other.ids)}
        for name, wanted in {**self.counts(), "full layers": write_layers(self.ids)}.items():
            if actual.get(name, 0) != wanted:
                return f"{name} {wanted}, but this model has {actual.get(name, 0)}"
        return None

    def layers_of_stage(self, pp_rank: int, pp_size: int) -> range:
        """The layers of one pipeline stage by their places; a remainder goes to the last stages, as SGLang splits.

        Raises:
            GeometryError: There are more stages than layers, or several stages of a model with other layers too.
        """
        if pp_size > 1 and self.layer_ids is not None:
            raise GeometryError(
                f"pp_size {pp_size} splits all layers of a model, of which only some are tuned here; use pp_size 1"
            )
        if not 0 <= pp_rank < pp_size or pp_size > self.num_layers:
            raise GeometryError(
                f"pp_rank {pp_rank} of pp_size {pp_size} does not fit {self.num_layers} layers; pipeline stages"
                f" (--pp-size) may be 1 to {self.num_layers}"
            )
        share, remainder = divmod(self.num_layers, pp_size)  # as sglang.srt.distributed.utils.get_pp_indices
        sizes = [share + (stage >= pp_size - remainder) for stage in range(pp_size)]
        start = sum(sizes[:pp_rank])
        return range(start, start + sizes[pp_rank])

    def row_shape(
        self, k_layout: ScaleLayout = WHOLE_HEADS, v_layout: ScaleLayout = WHOLE_HEADS, *, tp_size: int = 1
    ) -> RowShape:
        """The shape of a rank's rows; the whole model's by default."""
        heads = len(self.kv_heads_of_rank(0, tp_size))
        return RowShape(heads, self.head_dim, self.v_head_dim, k_layout, v_layout, self.rope_dim)

    def bf16_bytes_per_token(self, *, tp_size: int = 1) -> int:
        """The bytes of one token in an unquantized 16-bit cache, all layers."""
        return bytes_per_token([PrecisionPair(16, 16)] * self.num_layers, self.row_shape(tp_size=tp_size))

    def counts(self) -> dict[str, int]:
        """The fields besides the layers' ids, and rotary channels of latents alone."""
        idle = ("layer_ids",) if self.is_latent else ("layer_ids", "rope_dim")
        return {name: value for name, value in asdict(self).items() if name not in idle}

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain JSON, for profiles and output; without the layers' ids where they are all layers."""
        return {**self.counts(), **({} if self.layer_ids is None else {"layer_ids": list(self.layer_ids)})}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelGeometry:
        """The geometry that `as_dict` wrote."""
        ids = fields.get("layer_ids")
        return cls(**{**fields, "layer_ids": None if ids is None else tuple(ids)})


def kv_heads_of_rank(num_kv_heads: int, tp_rank: int, tp_size: int) -> range:
    """The KV heads that one tensor-parallel rank stores; beyond num_kv_heads ranks, heads are replicated.

    Raises:
        GeometryError: The tp_size neither divides num_kv_heads nor is a multiple of it.
    """
    if not 0 <= tp_rank < tp_size:
        raise GeometryError(f"tp_rank {tp_rank} is outside 0..{tp_size - 1}")
    if tp_size <= num_kv_heads:
        if num_kv_heads % tp_size:
            raise GeometryError(f"tp_size {tp_size} does not divide num_kv_heads {num_kv_heads}")
        share = num_kv_heads // tp_size
        return range(tp_rank * share, (tp_rank + 1) * share)
    if tp_size % num_kv_heads:
        raise GeometryError(f"tp_size {tp_size} is no multiple of num_kv_heads {num_kv_heads}")
    head = tp_rank * num_kv_heads // tp_size  # neighbouring ranks hold copies of one head
    return range(head, head + 1)


def read_num_layers(text: Any) -> int:
    """The layers that a decoder's configuration counts; a `GeometryError` where it does not."""
    return _count(text, "num_hidden_layers", "n_layer", "num_layers")


def read_latent(text: Any) -> tuple[int, int, int, int, int]:
    """The query heads, the one KV head, and the channels of a latent, of its values (none) and of what is rotary.

    A `GeometryError` where a decoder's configuration does not tell them.
    """
    return _count(text, "num_attention_heads"), 1, _count(text, "kv_lora_rank"), 0, _count(text, "qk_rope_head_dim")


def read_heads(text: Any, layer_id: int | None = None, prefix: str = "") -> tuple[int, int, int, int]:
    """The query heads, KV heads, and channels of a key head and a value head in a decoder's configuration.

    They are those of one layer, or of all. Fields whose name begins with the prefix are read before those without.

    Raises:
        GeometryError: The configuration lacks a count, or heads differ from layer to layer where they are of all.
    """
    own = getattr(text, "per_layer_config", None) if getattr(text, "is_heterogeneous", False) else None
    if layer_id is not None and own is not None:
        text = own[layer_id]

    def optional(*names: str) -> int | None:
        prefixed = (prefix + name for name in names) if prefix else ()
        return _optional(text, *prefixed, *names, layer_id=layer_id)

    num_heads = optional("num_attention_heads_per_layer")
    if num_heads is None:
        num_heads = optional("num_attention_heads", "n_head", "num_heads")
    if num_heads is None:
        num_heads = _count(text, "num_attention_heads", "n_head", "num_heads")
    num_kv_heads = optional("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        num_kv_heads = 1  # whatever Falcon's num_kv_heads says
    elif num_kv_heads is None:
        num_kv_heads = num_heads
    head_dim = optional("head_dim")
    if head_dim is None:
        hidden = _count(text, "hidden_size", "n_embd", "d_model")
        if num_heads < 1 or hidden % num_heads:
            raise GeometryError(f"hidden_size {hidden} is no multiple of {num_heads} heads, and head_dim is absent")
        head_dim = hidden // num_heads
    return num_heads, num_kv_heads, head_dim, optional("v_head_dim") or head_dim


def _optional(config: Any, *names: str, layer_id: int | None = None) -> int | None:
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError as error:  # transformers' AmbiguousGlobalPerLayerAttributeError
            raise GeometryError(f"{name} differs from layer to layer; such models are not supported") from error
        if isinstance(value, Sequence) and not isinstance(value, str):
            if layer_id is not None and layer_id < len(value):
                value = [value[layer_id]]
            if len(set(value)) != 1:
                raise GeometryError(
                    f"{name} differs from layer to layer ({list(value)}); such models are not supported"
                )
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _count(config: Any, *names: str) -> int:
    value = _optional(config, *names)
    if value is None:
        kind = getattr(config, "model_type", type(config).__name__)
        raise GeometryError(f"configuration of {kind!r} has no {names[0]}: is this a decoder-only language model?")
    return value
