"""The storage of every layer: all that the digest covers. Rules that span parts are the profile's."""

import base64
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from kvtuner.exported_configs.profile.field_types import MAX_COUNT, Bits, Count, LayerId, StrictModel, WordSize
from kvtuner.geometry import ModelGeometry
from kvtuner.layer_geometry import LayerGeometry
from kvtuner.precision import (
    NATIVE_BITS,
    SHORT_WORD_BITS,
    TOKEN_GROUPS,
    WIDE_WORD_BITS,
    Fit,
    Granularity,
    PrecisionPair,
    RowShape,
    ScaleLayout,
    Side,
    WordBits,
)
from kvtuner.transforms import transform_names

_MAX_BASE64_CHARS: Final = 4 * -(-2 * MAX_COUNT * MAX_COUNT // 3)

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

# pydantic takes the names from the one table of transforms; to a type checker a name is text.
if TYPE_CHECKING:
    KeyTransform = str
    ValueTransform = str
else:
    KeyTransform = Literal[transform_names("k")]
    ValueTransform = Literal[transform_names("v")]


class Fp16Array(StrictModel):
    """A finite fp16 matrix, little-endian, in strict base64 with padding.

    Attributes:
        shape: [num_kv_heads, head_dim].
        data: base64 of exactly 2 * num_kv_heads * head_dim bytes.
    """

    dtype: Literal["float16"]
    shape: Annotated[tuple[Count, Count], Field(strict=False)]
    data: Annotated[str, Field(max_length=_MAX_BASE64_CHARS)]

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        num_bytes = 2 * self.shape[0] * self.shape[1]
        num_chars = 4 * -(-num_bytes // 3)
        if len(self.data) != num_chars:
            raise ValueError(f"data of shape {list(self.shape)} needs {num_chars} characters, not {len(self.data)}")
        try:
            raw = base64.b64decode(self.data, validate=True)
        except ValueError as error:
            raise ValueError(f"data must be base64: {error}") from error
        if len(raw) != num_bytes or base64.b64encode(raw).decode() != self.data:
            raise ValueError(f"data must be canonical base64 of {num_bytes} bytes, but decodes to {len(raw)}")
        if not np.isfinite(self.values()).all():
            raise ValueError("data must be finite, but holds NaN or infinity")
        return self

    def values(self) -> "NDArray[np.float16]":
        """The numbers of the matrix, [num_kv_heads, head_dim]."""
        return np.frombuffer(base64.b64decode(self.data), dtype="<f2").reshape(self.shape).astype(np.float16)

    def decode(self) -> "torch.Tensor":
        """The matrix, fp16 [num_kv_heads, head_dim], on the CPU."""
        import torch  # here, since files are checked, shown and compared without

        return torch.from_numpy(self.values())


def encode_fp16(matrix: "torch.Tensor") -> dict[str, Any]:
    """The fields of an fp16 matrix in the file; `Fp16Array` checks them."""
    values = matrix.detach().cpu().contiguous().numpy()
    assert values.dtype == np.float16 and values.ndim == 2
    data = values.astype("<f2").tobytes()
    return {"dtype": "float16", "shape": list(matrix.shape), "data": base64.b64encode(data).decode()}


class _GridDefaults(StrictModel):
    """The settings that keys and values have alike and version 1 does not name: how grids are fitted and written.

    Attributes:
        fit: The fit of grids.
        word_bits: The bits of a scale word; None is 32. Codes of 8 bits have 32 in any case.
    """

    fit: Fit | None = None
    word_bits: WordSize | None = None

    @property
    def grid_fit(self) -> Fit:
        """The fit of grids in any version."""
        return self.fit or "minmax"

    @property
    def grid_word_bits(self) -> WordBits:
        """The bits of a scale word in any version."""
        return SHORT_WORD_BITS if self.word_bits == SHORT_WORD_BITS else WIDE_WORD_BITS


class KeyDefaults(_GridDefaults):
    """The settings that keys share over all layers, and the transform of layers that name none; none if per_channel.

    Attributes:
        granularity: The granularity of scales: per_token, or one scale for some tokens of every channel.
        group_size: The channels per scale of a token; the tokens per scale of a channel if per_channel.
        symmetric: Whether grids lie around zero.
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
        if self.grid_fit == "least_squares":
            raise ValueError("per_channel keys have fit 'minmax', not 'least_squares'; use per_token with it")
        if self.grid_word_bits != WIDE_WORD_BITS:
            raise ValueError("per_channel keys have 32 bits for scale and minimum, not 16; use per_token with it")
        return self


class ValueDefaults(_GridDefaults):
    """The settings that values share over all layers, and the transform of layers that name none."""

    granularity: Literal["per_token"]
    group_size: Count
    symmetric: bool
    transform: ValueTransform


class Defaults(StrictModel):
    """The defaults of keys and values."""

    k: KeyDefaults
    v: ValueDefaults

    def row_shape(self, geometry: ModelGeometry, tp_size: int = 1) -> RowShape:
        """The shape of the rows of one of `tp_size` ranks; `GeometryError` where heads cannot be split among them."""
        return geometry.row_shape(layout_of(None, self.k), layout_of(None, self.v), tp_size=tp_size)

    def layer_shape(self, geometry: LayerGeometry, layer: "LayerRecord", tp_size: int = 1) -> RowShape:
        """The shape of one layer's rows, with its own groups where it has some; errors are those of `row_shape`."""
        return geometry.row_shape(layout_of(layer.k, self.k), layout_of(layer.v, self.v), tp_size=tp_size)


class KeyRecord(StrictModel):
    """The storage of one layer's keys.

    Attributes:
        transform: The transform's name; None for the default's, and always at 16 bits.
        group_size: The channels per scale of a token; None for the default's, and always at 16 bits.
        mu: The mean key; present exactly if the transform centers.
        lam: The channels' divisors, ``lambda`` in the file; present exactly if the transform balances.
    """

    bits: Bits
    transform: KeyTransform | None = None
    group_size: Count | None = None
    mu: Fp16Array | None = None
    lam: Fp16Array | None = Field(default=None, alias="lambda")


class ValueRecord(StrictModel):
    """The storage of one layer's values; transform and group are the default's if None."""

    bits: Bits
    transform: ValueTransform | None = None
    group_size: Count | None = None


class LayerRecord(StrictModel):
    """The storage of one layer by its global id; a latent has no values beside what stands for keys."""

    layer: LayerId
    k: KeyRecord
    v: ValueRecord | None = None

    @property
    def pair(self) -> PrecisionPair:
        """The widths of keys and values, which are one where a latent is read as both."""
        return PrecisionPair(self.k.bits, (self.v or self.k).bits)

    def sides(self, defaults: Defaults) -> "list[tuple[Side, SideRecord, SideDefaults]]":
        """The sides that the layer stores, with their defaults."""
        keys: tuple[Side, SideRecord, SideDefaults] = ("k", self.k, defaults.k)
        return [keys] if self.v is None else [keys, ("v", self.v, defaults.v)]


SideRecord = KeyRecord | ValueRecord
SideDefaults = KeyDefaults | ValueDefaults


def resolve_transform(record: SideRecord, defaults: SideDefaults) -> KeyTransform:
    """The transform of keys or values of a layer: none at 16 bits, else its own or the default."""
    if record.bits == NATIVE_BITS:
        return "none"
    return record.transform or defaults.transform


def group_size_of(record: SideRecord, defaults: SideDefaults) -> int:
    """The channels per scale of keys or values of a layer: its own, or the default."""
    return record.group_size or defaults.group_size


def layout_of(record: SideRecord | None, defaults: SideDefaults) -> ScaleLayout:
    """The scale layout of keys or values of a layer; that of the defaults without a record."""
    group_size = defaults.group_size if record is None else group_size_of(record, defaults)
    return ScaleLayout(group_size, defaults.grid_word_bits, defaults.granularity)
