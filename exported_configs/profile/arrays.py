"""The arrays of a profile: fp16 [num_kv_heads, head_dim] as base64. Knows nothing of what they mean."""

import base64
import binascii
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator

from kvtuner.exported_configs.profile.fields import MAX_COUNT, Count, StrictModel

_MAX_BASE64_CHARS: Final = 4 * -(-2 * MAX_COUNT * MAX_COUNT // 3)


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
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"data must be base64: {error}") from error
        if len(raw) != num_bytes or base64.b64encode(raw).decode() != self.data:
            raise ValueError(f"data must be canonical base64 of {num_bytes} bytes, but decodes to {len(raw)}")
        if not np.isfinite(np.frombuffer(raw, dtype="<f2")).all():
            raise ValueError("data must be finite, but holds NaN or infinity")
        return self

    def decode(self) -> torch.Tensor:
        """The matrix, fp16 [num_kv_heads, head_dim], on the CPU."""
        values = np.frombuffer(base64.b64decode(self.data), dtype="<f2").reshape(self.shape)
        return torch.from_numpy(values.astype(np.float16))


def encode_fp16(matrix: torch.Tensor) -> dict[str, Any]:
    """The fields of an fp16 matrix in the file; `Fp16Array` checks them."""
    assert matrix.dtype == torch.float16 and matrix.ndim == 2
    data = matrix.detach().cpu().contiguous().numpy().astype("<f2").tobytes()
    return {"dtype": "float16", "shape": list(matrix.shape), "data": base64.b64encode(data).decode()}
