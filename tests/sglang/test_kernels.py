"""A server whose attention is the Triton kernels, in Triton's interpreter, agrees with the transformers host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fixture_types import CompareServed, MixedProfile, ModelFolder

CHUNK = 64
LENGTHS = (150, 33)
"""The lengths of prompts. At four queries for a KV head, the second chunk of the first prompt is long enough that its
prefix is read back; the third chunk is not."""
TOKENS = 5


@pytest.mark.parametrize("name", ["llama-gqa", "Gemma2"])
def test_decoding_short_and_long_extends_agree(
    name: str,
    capped: dict[str, Any],
    compare_served: CompareServed,
    model_folder: ModelFolder,
    mixed_profile: MixedProfile,
) -> None:
    fields = capped if name == "Gemma2" else {}
    folder = model_folder(name, num_hidden_layers=9, num_key_value_heads=1, **fields)
    grids: dict[str, Any] = {} if fields else {"fit": "least_squares", "words": (16, 16), "half_groups": True}
    served = compare_served(
        folder, mixed_profile(folder, **grids), "--chunked-prefill-size", str(CHUNK),
        lengths=LENGTHS, num_tokens=TOKENS, chunk=CHUNK, KVTUNER_ATTENTION="triton",
    )  # fmt: skip
    assert "attention triton, attend fresh, self-test passed" in served.log
    assert served.agreement.own > 1e-4
    assert served.agreement.is_near, served.agreement
    assert served.agreement.same_argmax == 1, served.agreement
