"""What a prefix cache finds of layers of other kinds: rows in both parts of a pool, states kept at its end, latents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from served_layers.kimi_linear import written_as_the_hub

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import MixedProfile, ModelFolder, Prompts, SaveProfile, Serve

L, W, C, F = "linear_attention", "sliding_attention", "chunked_attention", "full_attention"
CHUNK = 64
BY_NAME = ("--attention-backend", "triton")
"""SGLang asks for this backend by name, before it knows of a profile, beside windows and beside states."""
STATES = (*BY_NAME, "--max-mamba-cache-size", "48", "--skip-server-warmup")
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gpt-oss": (
        {"layer_types": [W, F, W, F], "num_hidden_layers": 4}, (*BY_NAME, "--triton-attention-num-kv-splits", "1"),
    ),
    "llama4-images": (
        {
            "layer_types": [C, C, C, F] * 2, "no_rope_layers": [1, 1, 1, 0] * 2, "num_hidden_layers": 8,
            "interleave_moe_layer_step": 9,
        },
        (*BY_NAME, "--triton-attention-num-kv-splits", "1"),
    ),
    "qwen3-next": (
        {"layer_types": [L, F, L, F], "num_hidden_layers": 4, "full_attention_interval": 2}, STATES,
    ),
    "granite4": ({"layer_types": [L, F, L, F], "num_hidden_layers": 4}, STATES),
    "kimi-linear": ({}, STATES),
    "deepseek-v2": (
        {"initializer_range": 0.2, "moe_layer_freq": 1, "scoring_func": "softmax", "num_hidden_layers": 3}, (),
    ),
}  # fmt: skip
"""What changes a tiny model, and the flags that it is served with."""


@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss",
        "llama4-images",
        "qwen3-next",
        pytest.param("granite4", marks=pytest.mark.full),
        "deepseek-v2",
        "kimi-linear",
    ],
)
def test_by_cache_answers_depend_neither_on_hits_nor_on_chunks(
    name: str, serve: Serve, model_folder: ModelFolder, mixed_profile: MixedProfile, save_profile: SaveProfile,
    prompts: Prompts, tmp_path: Path,
) -> None:  # fmt: skip
    changes, flags = MODELS[name]
    folder = model_folder(name, **changes)
    if name == "kimi-linear":
        folder = written_as_the_hub(folder, tmp_path / name)
    profile = ("--kvtuner-profile", str(save_profile(mixed_profile(folder, by_kinds=True))))
    long, short, tail = prompts(2 * CHUNK + 22, 40, 20)
    longer = [*long, *tail]
    by_cache = ("--kvtuner-attend", "cache", "--chunked-prefill-size", str(CHUNK))
    with serve(folder, *profile, *flags, *by_cache, SGLANG_MAMBA_CONV_DTYPE="float32") as server:
        server.flush()
        first = server.generate([long], 24)[0]
        after_hit = server.generate([long], 24)[0]
        # Both at once, one behind a prefix of many windows.
        together = server.generate([longer, short], 24)
        server.flush()
        alone = [server.generate([ids], 24)[0] for ids in (longer, short)]
    assert first["meta_info"]["cached_tokens"] == 0 < after_hit["meta_info"]["cached_tokens"]
    assert after_hit["output_ids"] == first["output_ids"]
    # States are kept where a chunk of theirs ends, the rows of tokens to the last.
    assert together[0]["meta_info"]["cached_tokens"] >= (1 if "--max-mamba-cache-size" in flags else len(long))
    assert alone[0]["meta_info"]["cached_tokens"] == 0
    assert [answer["output_ids"] for answer in together] == [answer["output_ids"] for answer in alone]
