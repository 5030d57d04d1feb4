"""The shape of a model's KV cache, read from its transformers configuration. Knows nothing of weights or budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from kvtuner.errors import GeometryError
from kvtuner.precision import WHOLE_HEADS, PrecisionPair, RowShape, ScaleLayout, bytes_per_token


class ConfigLike(Protocol):
    """The part of a `transformers.PretrainedConfig` that is read here."""

    def get_text_config(self, decoder: bool = ...) -> Any:
        """The configuration of the language model inside a multi-modal one."""
        ...


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The layers that own a KV cache, the heads of the whole model, and the channels of a key head and a value head.

    The last `num_shared_layers` of a model read an earlier layer's cache and store nothing.
    """

    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    num_shared_layers: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < (0 if name == "num_shared_layers" else 1):
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
        num_layers = _count(text, "num_hidden_layers", "n_layer", "num_layers")
        num_heads = _optional(text, "num_attention_heads_per_layer")
        if num_heads is None:
            num_heads = _count(text, "num_attention_heads", "n_head", "num_heads")
        num_kv_heads = _optional(text, "num_key_value_heads", "num_kv_heads", "n_head_kv")
        if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
            num_kv_heads = 1  # whatever Falcon's num_kv_heads says
        elif num_kv_heads is None:
            num_kv_heads = num_heads
        head_dim = _optional(text, "head_dim")
        if head_dim is None:
            hidden = _count(text, "hidden_size", "n_embd", "d_model")
            if hidden % num_heads:
                raise GeometryError(f"hidden_size {hidden} is no multiple of {num_heads} heads, and head_dim is absent")
            head_dim = hidden // num_heads
        shared = _optional(text, "num_kv_shared_layers") or 0
        v_head_dim = _optional(text, "v_head_dim") or head_dim
        return cls(num_layers - shared, num_heads, num_kv_heads, head_dim, v_head_dim, shared)

    def kv_heads_of_rank(self, tp_rank: int, tp_size: int) -> range:
        """The KV heads that one tensor-parallel rank stores; see the function of that name."""
        return kv_heads_of_rank(self.num_kv_heads, tp_rank, tp_size)

    def layers_of_stage(self, pp_rank: int, pp_size: int) -> range:
        """The global layer ids of one pipeline stage; a remainder goes to the last stages, as SGLang splits.

        Raises:
            GeometryError: There are more stages than layers.
        """
        if not 0 <= pp_rank < pp_size or pp_size > self.num_layers:
            raise GeometryError(f"pp_rank {pp_rank} of pp_size {pp_size} does not fit {self.num_layers} layers")
        share, remainder = divmod(self.num_layers, pp_size)  # as sglang.srt.distributed.utils.get_pp_indices
        sizes = [share + (stage >= pp_size - remainder) for stage in range(pp_size)]
        start = sum(sizes[:pp_rank])
        return range(start, start + sizes[pp_rank])

    def row_shape(
        self, k_layout: ScaleLayout = WHOLE_HEADS, v_layout: ScaleLayout = WHOLE_HEADS, *, tp_size: int = 1
    ) -> RowShape:
        """The shape of a rank's rows; the whole model's by default."""
        heads = len(self.kv_heads_of_rank(0, tp_size))
        return RowShape(heads, self.head_dim, self.v_head_dim, k_layout, v_layout)

    def bf16_bytes_per_token(self, *, tp_size: int = 1) -> int:
        """The bytes of one token in an unquantized 16-bit cache, all layers."""
        return bytes_per_token([PrecisionPair(16, 16)] * self.num_layers, self.row_shape(tp_size=tp_size))

    def as_dict(self) -> dict[str, int]:
        """The fields as plain integers, for profiles and JSON output."""
        return asdict(self)


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


def _optional(config: Any, *names: str) -> int | None:
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError as error:  # transformers' AmbiguousGlobalPerLayerAttributeError
            raise GeometryError(f"{name} differs from layer to layer; such models are not supported") from error
        if isinstance(value, Sequence) and not isinstance(value, str):
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
