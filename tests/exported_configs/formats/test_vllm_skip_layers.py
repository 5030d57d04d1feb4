"""vLLM's list of layers that are not quantized."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats.conversion import write

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("ranges", "text", "dtype"),
    [
        ("0:bf16,1-2:int8,3:bf16", "0 3\n", "int8_per_token_head"),
        ("0-1:int4,2:bf16,3:int4", "2\n", "int4_per_token_head"),
        ("0-3:int4", "\n", "int4_per_token_head"),
    ],
)
def test_unquantized_layers_are_listed_and_the_dtype_is_said(
    take: Callable[..., Any], ranges: str, text: str, dtype: str
) -> None:
    profile = take(ranges, "ranges")[0]
    exported = write(profile, "vllm-skip-layers", lossy=True)
    assert exported.text == text
    assert f"--kv-cache-dtype {dtype}," in exported.notes[0]
    assert any("leave --kv-cache-dtype-skip-layers out" in note for note in exported.notes) == (text == "\n")
    first = next(layer for layer, pair in enumerate(profile.pairs) if pair.k_bits != 16)
    lost = "bits, groups, symmetry and transforms of quantized layers"
    assert exported.notes[-1] == f"dropped, from layer {first} on: {lost}"
    with pytest.raises(ProfileError, match=f"layer {first}: {lost}; --lossy accepts that"):
        write(profile, "vllm-skip-layers")


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        ("0:bf16,1-2:int8,3:int4", "layer 1 is K8V8 and layer 3 is K4V4"),
        ("0:int4,1-2:K16V4,3:bf16", "layer 0 is K4V4 and layer 1 is K16V4"),
        ("0:bf16,1-3:int2", "no dtype for layer 1, K2V2"),
        ("0:bf16,1-3:K8V4", "no dtype for layer 1, K8V4"),
        ("0-3:bf16", "every layer has 16 bits"),
    ],
)
@pytest.mark.parametrize("lossy", [True, False])
def test_what_one_dtype_cannot_store_is_refused(take: Callable[..., Any], ranges: str, says: str, lossy: bool) -> None:
    with pytest.raises(ProfileError, match=re.escape(says)):
        write(take(ranges, "ranges")[0], "vllm-skip-layers", lossy=lossy)
