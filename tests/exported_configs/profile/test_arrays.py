"""fp16 matrices as they stand in a profile and in a sensitivity table."""

from __future__ import annotations

import json

import torch

from kvtuner.exported_configs.profile.arrays import Fp16Array, encode_fp16


def test_every_finite_fp16_survives_its_encoding() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()].reshape(248, 256)
    item = json.loads(json.dumps(encode_fp16(finite)))
    assert torch.equal(Fp16Array.model_validate(item).decode().view(torch.int16), finite.view(torch.int16))
    assert (item["dtype"], item["shape"]) == ("float16", [248, 256])


def test_fp16_is_encoded_little_endian() -> None:
    assert encode_fp16(torch.tensor([[1.0]], dtype=torch.float16))["data"] == "ADw="
