"""The storage of every layer: all that the digest covers. Rules that span parts are the profile's."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from kvtuner.errors import GeometryError
from kvtuner.exported_configs.profile.arrays import Fp16Array
from kvtuner.exported_configs.profile.fields import MAX_COUNT, Bits, Count, StrictModel
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import NATIVE_BITS, TOKEN_GROUPS, Granularity, RowShape
from kvtuner.transforms import transform_names

# pydantic takes the names from the one table of transforms; to a type checker a name is text.
if TYPE_CHECKING:
    KeyTransform = str
    ValueTransform = str
else:
    KeyTransform = Literal[transform_names("k")]
    ValueTransform = Literal[transform_names("v")]


def _check_granularity(value: object) -> object:
    if value == "per_channel":
        raise ValueError("values are stored per token, and only keys may be per_channel; re-export with per_token")
    return value


class GeometryRecord(StrictModel):
    """The fields of `ModelGeometry` in the file."""

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
        """The `ModelGeometry` of these fields."""
        return ModelGeometry(**self.model_dump())


class KeyDefaults(StrictModel):
    """The settings that keys share over all layers, and the transform of layers that name none.

    Attributes:
        granularity: The granularity of scales: per_token, or one scale for some tokens of every channel.
        group_size: The channels per scale of a token; the tokens per scale of a channel if per_channel.
        symmetric: Whether grids lie around zero.
        transform: The transform's name; none if per_channel.
    """

    granularity: Granularity
    group_size: Count
    symmetric: bool
    transform: KeyTransform

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.granularity == "per_token":
            return self
        if self.group_size not in TOKEN_GROUPS:
            raise ValueError(
                f"per_channel keys need a group_size of {TOKEN_GROUPS} tokens, not {self.group_size}; KIVI's is 32"
            )
        if self.transform != "none":
            raise ValueError(f"per_channel keys have transform 'none', not {self.transform!r}; use per_token with it")
        return self


class ValueDefaults(StrictModel):
    """The settings that values share over all layers, and the transform of layers that name none."""

    granularity: Annotated[Literal["per_token"], BeforeValidator(_check_granularity)]
    group_size: Count
    symmetric: bool
    transform: ValueTransform


class Defaults(StrictModel):
    """The defaults of keys and values."""

    k: KeyDefaults
    v: ValueDefaults

    def row_shape(self, geometry: ModelGeometry, tp_size: int = 1) -> RowShape:
        """The shape of the rows of one of `tp_size` tensor-parallel ranks.

        Raises:
            GeometryError: the heads cannot be split among that many ranks.
        """
        shape = geometry.row_shape(tp_size=tp_size, k_group_size=self.k.group_size, v_group_size=self.v.group_size)
        return replace(shape, k_granularity=self.k.granularity)


class _SideRecord(StrictModel):
    bits: Bits


class KeyRecord(_SideRecord):
    """The storage of one layer's keys.

    Attributes:
        transform: The transform's name; None for the default's, and always at 16 bits.
        mu: The mean key; present exactly if the transform centers.
        lam: The channels' divisors, ``lambda`` in the file; present exactly if the transform balances.
    """

    transform: KeyTransform | None = None
    mu: Fp16Array | None = None
    lam: Fp16Array | None = Field(default=None, alias="lambda")


class ValueRecord(_SideRecord):
    """The storage of one layer's values; the transform is the default's if None."""

    transform: ValueTransform | None = None


class LayerRecord(StrictModel):
    """The storage of one layer by its global id."""

    layer: Annotated[int, Field(ge=0, lt=MAX_COUNT)]
    k: KeyRecord
    v: ValueRecord


def resolve_transform(record: KeyRecord | ValueRecord, defaults: KeyDefaults | ValueDefaults) -> KeyTransform:
    """The transform of keys or values of a layer: none at 16 bits, else its own or the default."""
    if record.bits == NATIVE_BITS:
        return "none"
    return record.transform or defaults.transform
