"""How every layer is stored: all that the digest covers. Rules that span parts are the profile's."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from kvtuner.errors import GeometryError
from kvtuner.exported_configs.arrays import Fp16Array
from kvtuner.exported_configs.fields import MAX_COUNT, Bits, Count, Section
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import NATIVE_BITS

KeyTransform = Literal[
    "none",
    "hadamard",
    "balanced",
    "balanced+hadamard",
    "centered",
    "centered+hadamard",
    "centered+balanced",
    "centered+balanced+hadamard",
]
ValueTransform = Literal["none", "hadamard"]


def _check_granularity(value: object) -> object:
    if value == "per_channel":
        raise ValueError("per-channel keys need tail pages, which no host has yet; re-export with per_token")
    return value


class Geometry(Section):
    """`ModelGeometry` as it stands in the file."""

    num_layers: Count
    num_attention_heads: Count
    num_kv_heads: Count
    head_dim: Count
    v_head_dim: Count
    num_shared_layers: Annotated[int, Field(ge=0, le=MAX_COUNT)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            self.to_geometry()
        except GeometryError as error:
            raise ValueError(str(error)) from error
        return self

    def to_geometry(self) -> ModelGeometry:
        """The same as a dataclass with its methods."""
        return ModelGeometry(**self.model_dump())


class _SideDefaults(Section):
    granularity: Annotated[Literal["per_token"], BeforeValidator(_check_granularity)]
    group_size: Count
    symmetric: bool


class KeyDefaults(_SideDefaults):
    """What keys share over all layers, and the transform of layers that name none."""

    transform: KeyTransform


class ValueDefaults(_SideDefaults):
    """What values share over all layers, and the transform of layers that name none."""

    transform: ValueTransform


class Defaults(Section):
    """Defaults of keys and values."""

    k: KeyDefaults
    v: ValueDefaults


class _StoredSide(Section):
    bits: Bits

    @model_serializer(mode="wrap")
    def _omit_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


class StoredKeys(_StoredSide):
    """How one layer's keys are stored.

    Attributes:
        transform: the default's if None; always None at 16 bits.
        mu: present exactly if the transform centers.
        lam: ``lambda`` in the file; present exactly if the transform balances.
    """

    transform: KeyTransform | None = None
    mu: Fp16Array | None = None
    lam: Fp16Array | None = Field(default=None, alias="lambda")


class StoredValues(_StoredSide):
    """How one layer's values are stored; the transform is the default's if None."""

    transform: ValueTransform | None = None


class StoredLayer(Section):
    """One layer by its global id."""

    layer: Annotated[int, Field(ge=0, lt=MAX_COUNT)]
    k: StoredKeys
    v: StoredValues


def resolve_transform(stored: StoredKeys | StoredValues, defaults: KeyDefaults | ValueDefaults) -> KeyTransform:
    """The transform that keys or values of a layer have: none at 16 bits, else its own or the default."""
    if stored.bits == NATIVE_BITS:
        return "none"
    return stored.transform or defaults.transform
