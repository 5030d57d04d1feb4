"""The states that SGLang keeps of layers without keys, by a model's configuration. Knows nothing of schemes or GPUs.

A state is a matrix for each head and the last inputs of a convolution, or these alone. A rank has its share of heads,
and a server without a profile keeps the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtuner.errors import GeometryError, ServingError
from kvtuner.supported_models import num_state_layers

if TYPE_CHECKING:
    from kvtuner.calibration.model_loading import ModelShape

STATES_SHARE: Final = 0.9
"""SGLang's default of --mamba-full-memory-ratio: the bytes of states for each byte of tokens."""
_CONVOLUTION_BYTES: Final = 2
"""The bytes of an input of a convolution, which SGLang keeps in bfloat16 whatever the model's dtype is."""
_DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2}
"""The bytes of a number of a matrix, which is in float32 where no other dtype is named."""
_OWN_DTYPE: Final = "mamba_ssm_dtype"
_FIXED_DTYPE: Final = ("granitemoehybrid",)
"""The kinds of models whose matrices SGLang keeps in float32, whatever their configuration says."""


class _Fields(NamedTuple):
    """What a configuration calls the parts of a state."""

    num_groups: str
    num_heads: str
    head_dim: str
    state_dim: str
    convolution: str


_DELTA: Final = _Fields(
    "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
_DELTA_BY_CHANNEL: Final = _Fields(
    "linear_num_heads", "linear_num_heads", "linear_head_dim", "linear_head_dim", "linear_conv_kernel_dim"
)  # fmt: skip
_MAMBA: Final = _Fields("mamba_n_groups", "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv")
_NEMOTRON: Final = _Fields("n_groups", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel")
_FIELDS: Final = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA),
    **dict.fromkeys(("granitemoehybrid", "falcon_h1"), _MAMBA),
    "nemotron_h": _NEMOTRON,
    "kimi_linear": _DELTA_BY_CHANNEL,
}
"""The kinds of models that have matrices and for whose states SGLang has a pool."""
_CONVOLUTIONS_ALONE: Final = ("lfm2", "lfm2_moe")


@dataclass(frozen=True, slots=True)
class StateCost:
    """The states of a server.

    Attributes:
        num_bytes: The bytes on a rank of one state in all layers that have one.
        per_request: The states that a running request may take, with a radix cache.
    """

    num_bytes: int
    per_request: int


def state_cost(shape: ModelShape, *, tp_size: int = 1, pp_size: int = 1) -> StateCost | None:
    """The states of a model on tensor-parallel ranks; None of one whose layers keep keys alone.

    Raises:
        GeometryError: Heads cannot be split among ranks.
        ServingError: SGLang has no pool for the states, or none in pipeline stages that was tried.
    """
    num_layers = num_state_layers(shape.config)
    if not num_layers:
        return None
    text: Any = shape.config.get_text_config(decoder=True)
    if pp_size > 1:
        raise ServingError(
            "SGLang serves packed rows beside layers that keep a state in no pipeline stages yet: plan with --pp-size 1"
        )
    if text.model_type in _CONVOLUTIONS_ALONE:
        inputs = _split(text.hidden_size, tp_size) * (text.conv_L_cache - 1)
        return StateCost(num_layers * inputs * _CONVOLUTION_BYTES, per_request=3)
    if text.model_type not in _FIELDS:
        raise ServingError(
            f"SGLang has no pool for the states of {shape.architecture}, so that no server is planned for it; run it"
            " by KVTunerCache"
        )
    groups, heads, head_dim, state_dim, convolution = (getattr(text, name) for name in _FIELDS[text.model_type])
    if groups % tp_size:
        groups = tp_size  # a rank has a copy of each group that its heads need
    own = None if text.model_type in _FIXED_DTYPE else getattr(text, _OWN_DTYPE, None)
    matrices = _split(heads, tp_size) * head_dim * state_dim * _DTYPE_BYTES.get(str(own), 4)
    inputs = _split(heads * head_dim + 2 * groups * state_dim, tp_size) * (convolution - 1)
    return StateCost(num_layers * (matrices + inputs * _CONVOLUTION_BYTES), per_request=5)


def _split(number: int, tp_size: int) -> int:
    if number % tp_size:
        raise GeometryError(f"states of {number} heads or channels cannot be split among {tp_size} ranks")
    return int(number // tp_size)
