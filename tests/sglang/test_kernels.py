"""A server whose attention is the Triton kernels, in Triton's interpreter, agrees with the transformers host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoConfig

if TYPE_CHECKING:
    from fixture_types import Compare, MixedLayers, ModelFolder, ProfileOf, Prompts, SaveProfile, Serve

CHUNK = 64
LENGTHS = (150, 33)
"""The lengths of prompts. At four queries for a KV head, the second chunk of the first prompt is long enough that its
prefix is read back; the third chunk is not."""
TOKENS = 5


@pytest.mark.parametrize("name", ["llama-gqa", "Gemma2"])
def test_decoding_short_and_long_extends_agree(
    name: str,
    capped: dict[str, Any],
    serve: Serve,
    compare: Compare,
    prompts: Prompts,
    model_folder: ModelFolder,
    profile_of: ProfileOf,
    save_profile: SaveProfile,
    mixed_layers: MixedLayers,
) -> None:
    fields = capped if name == "Gemma2" else {}
    folder = model_folder(name, num_hidden_layers=9, num_key_value_heads=1, **fields)
    config = AutoConfig.from_pretrained(folder)
    grids: dict[str, Any] = {} if fields else {"fit": "least_squares", "words": (16, 16), "half_groups": True}
    profile = profile_of(config, mixed_layers(config), **grids)
    flags = ("--kvtuner-profile", str(save_profile(profile)), "--chunked-prefill-size", str(CHUNK))
    with serve(folder, *flags, KVTUNER_ATTENTION="triton") as server:
        agreement = compare(server, folder, profile, prompts(*LENGTHS), TOKENS, chunk=CHUNK)
        log = server.log
    assert "attention triton, attend fresh, self-test passed" in log
    assert agreement.own > 1e-4
    assert agreement.divergence <= 0.02 * agreement.own + 1e-6, agreement
    assert agreement.same_argmax == 1, agreement
