"""Geometry of real transformers configurations, checked against the caches that their models fill."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from kvtuner.errors import GeometryError
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair, ScaleLayout


def geometry(**changes: int) -> ModelGeometry:
    values = {"num_layers": 4, "num_attention_heads": 8, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
    return ModelGeometry(**{**values, **changes})


def config(prefix: str, **fields: Any) -> Any:
    if not hasattr(transformers, f"{prefix}Config"):
        pytest.skip(f"this transformers has no {prefix}")
    return getattr(transformers, f"{prefix}Config")(**fields)


def sizes(hidden: int, layers: int, heads: int, kv_heads: int | None = None, **more: Any) -> dict[str, Any]:
    """The fields that most configurations have."""
    fields = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, **more}
    return fields if kv_heads is None else {**fields, "num_key_value_heads": kv_heads}


LLAMA_3_8B = sizes(4096, 32, 32, 8)


@pytest.mark.parametrize(
    ("prefix", "fields", "expected"),
    [
        ("Llama", LLAMA_3_8B, (32, 32, 8, 128, 128)),
        ("Llama", {**LLAMA_3_8B, "num_key_value_heads": None}, (32, 32, 32, 128, 128)),
        ("Llama", {**LLAMA_3_8B, "num_key_value_heads": 1}, (32, 32, 1, 128, 128)),
        ("Qwen2", sizes(3584, 28, 28, 4), (28, 28, 4, 128, 128)),
        # Qwen3-0.6B: head_dim is not hidden_size / heads
        ("Qwen3", sizes(1024, 28, 16, 8, head_dim=128), (28, 16, 8, 128, 128)),
        # Qwen3-30B-A3B
        ("Qwen3Moe", sizes(2048, 48, 32, 4, head_dim=128), (48, 32, 4, 128, 128)),
        # Mistral-Nemo
        ("Mistral", sizes(5120, 40, 32, 8, head_dim=128), (40, 32, 8, 128, 128)),
        # Phi-3-mini: 96 channels
        ("Phi3", sizes(3072, 32, 32, 32), (32, 32, 32, 96, 96)),
        ("GPT2", {"n_embd": 768, "n_layer": 12, "n_head": 12}, (12, 12, 12, 64, 64)),
        ("OPT", sizes(2560, 32, 32), (32, 32, 32, 80, 80)),
        ("GPTBigCode", {"n_embd": 6144, "n_layer": 40, "n_head": 48, "multi_query": True}, (40, 48, 1, 128, 128)),
        ("GPTBigCode", {"n_embd": 768, "n_layer": 6, "n_head": 12, "multi_query": False}, (6, 12, 12, 64, 64)),
        # falcon-7b: num_kv_heads is filled with 71 and not read
        ("Falcon", sizes(4544, 32, 71, multi_query=True), (32, 71, 1, 64, 64)),
        # falcon-40b
        ("Falcon", sizes(8192, 60, 128, num_kv_heads=8, new_decoder_architecture=True), (60, 128, 8, 64, 64)),
        # falcon-rw-1b
        ("Falcon", sizes(2048, 24, 32, multi_query=False), (24, 32, 32, 64, 64)),
        # The last 15 of 35 layers read an earlier layer's cache.
        ("Gemma3n", {"text_config": {"num_hidden_layers": 35, "num_kv_shared_layers": 15}}, (20, 8, 2, 256, 256, 15)),
        ("Laguna", {"num_hidden_layers": 4, "num_attention_heads_per_layer": [48] * 4}, (4, 48, 8, 128, 128)),
    ],
)
def test_geometry_is_read_from_the_configuration(
    prefix: str, fields: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert ModelGeometry.from_config(config(prefix, **fields)) == ModelGeometry(*expected)


def test_geometry_of_a_multi_modal_model_is_its_language_models() -> None:
    text = {"model_type": "llama", **LLAMA_3_8B}
    llava = config("Llava", text_config=text, vision_config={"num_attention_heads": 12, "num_hidden_layers": 3})
    assert ModelGeometry.from_config(llava) == ModelGeometry.from_config(config("Llama", **LLAMA_3_8B))


TINY = sizes(48, 3, 6, vocab_size=32)
TINY_GLU = {**TINY, "intermediate_size": 16, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("prefix", "fields"),
    [
        ("Llama", TINY_GLU),
        ("Qwen3", {**TINY_GLU, "head_dim": 20}),
        ("Phi3", {**TINY_GLU, "pad_token_id": 0}),
        ("GPT2", {"vocab_size": 32, "n_layer": 3, "n_embd": 48, "n_head": 6, "bos_token_id": 0, "eos_token_id": 0}),
        ("Falcon", {**TINY, "multi_query": True}),
        ("Falcon", {**TINY, "multi_query": False}),
        (
            "Gemma3nText",
            {
                **TINY_GLU,
                "num_hidden_layers": 5,
                "head_dim": 16,
                "num_kv_shared_layers": 2,
                "layer_types": ["full_attention"] * 5,
                "vocab_size_per_layer_input": 32,
                "hidden_size_per_layer_input": 4,
                "laurel_rank": 2,
                "activation_sparsity_pattern": [0.0] * 5,
                "pad_token_id": 0,
            },
        ),
    ],
)
def test_geometry_is_the_shape_of_the_cache_that_the_model_fills(prefix: str, fields: dict[str, Any]) -> None:
    tiny = config(prefix, **fields)
    shape = ModelGeometry.from_config(tiny)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(tiny).eval()
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache, use_cache=True)
    filled = [layer for layer in cache.layers if layer.get_seq_length() == 3]
    assert len(filled) == shape.num_layers
    for layer in filled:
        assert layer.keys.shape == (1, shape.num_kv_heads, 3, shape.head_dim)
        assert layer.values.shape == (1, shape.num_kv_heads, 3, shape.v_head_dim)


def raw_config(**fields: Any) -> Any:
    """A configuration class that transformers does not have, as remote code brings it."""
    text = SimpleNamespace(model_type="remote", **fields)
    return SimpleNamespace(get_text_config=lambda decoder=False: text if decoder else None)


REMOTE = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}


def test_value_heads_may_be_narrower_than_key_heads() -> None:
    shape = ModelGeometry.from_config(raw_config(**REMOTE, head_dim=24, v_head_dim=16))
    assert (shape.head_dim, shape.v_head_dim) == (24, 16)


def test_counts_given_per_layer_are_read_where_they_are_all_equal() -> None:
    shape = ModelGeometry.from_config(raw_config(**REMOTE, num_key_value_heads=[2, 2], head_dim=(16, 16)))
    assert (shape.num_kv_heads, shape.head_dim) == (2, 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": [2, 4]}, "num_key_value_heads differs from layer to layer"),
        ({"head_dim": [16, 32]}, "head_dim differs from layer to layer"),
        ({"hidden_size": 66}, "hidden_size 66 is no multiple of 4 heads"),
        ({"hidden_size": None}, "'remote' has no hidden_size"),
        ({"num_hidden_layers": None}, "'remote' has no num_hidden_layers.*decoder-only"),
        ({"num_attention_heads": None}, "'remote' has no num_attention_heads"),
        ({"num_attention_heads": True}, "'remote' has no num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_kv_heads 3"),
        ({"num_key_value_heads": 0}, "num_kv_heads must be positive, but is 0"),
        ({"num_hidden_layers": -2}, "num_layers must be positive, but is -2"),
        ({"num_kv_shared_layers": 2}, "num_layers must be positive, but is 0"),
        ({"num_kv_shared_layers": -1}, "num_shared_layers must be positive, but is -1"),
    ],
)
def test_configuration_that_describes_no_cache_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        ModelGeometry.from_config(raw_config(**{**REMOTE, **fields}))


@pytest.mark.parametrize(
    ("prefix", "fields", "name"),
    [
        ("Gemma4Text", {}, "head_dim"),  # wider heads in its full-attention layers
        (
            "Laguna",
            {"num_hidden_layers": 2, "num_attention_heads_per_layer": [48, 64]},
            "num_attention_heads_per_layer",
        ),
        ("Mamba", {}, "num_attention_heads"),
    ],
)
def test_real_model_without_one_geometry_is_refused_by_the_field_that_says_so(
    prefix: str, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(GeometryError, match=rf"(?<!\w){name}(?!\w)"):
        ModelGeometry.from_config(config(prefix, **fields))


@pytest.mark.parametrize("num_kv_heads", range(1, 9))
@pytest.mark.parametrize("tp_size", range(1, 17))
def test_ranks_hold_every_head_equally_often_beside_the_query_heads_that_read_it(
    num_kv_heads: int, tp_size: int
) -> None:
    num_attention_heads = num_kv_heads * tp_size
    shape = geometry(num_attention_heads=num_attention_heads, num_kv_heads=num_kv_heads)
    if max(num_kv_heads, tp_size) % min(num_kv_heads, tp_size):
        with pytest.raises(GeometryError, match=f"tp_size {tp_size} .*num_kv_heads {num_kv_heads}"):
            shape.kv_heads_of_rank(0, tp_size)
        return
    ranks = [shape.kv_heads_of_rank(rank, tp_size) for rank in range(tp_size)]
    copies = max(1, tp_size // num_kv_heads)
    assert sorted(itertools.chain(*ranks)) == sorted(list(range(num_kv_heads)) * copies)
    for rank, heads in enumerate(ranks):
        queries = range(rank * num_kv_heads, (rank + 1) * num_kv_heads)  # a rank's share of the query heads
        group = num_attention_heads // num_kv_heads  # query heads that read one KV head
        assert {query // group for query in queries} == set(heads)
        assert heads == range(heads[0], heads[-1] + 1)


@pytest.mark.parametrize(
    ("num_kv_heads", "tp_size", "expected"),
    [
        (8, 1, [range(8)]),
        (8, 4, [range(2), range(2, 4), range(4, 6), range(6, 8)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
        (1, 3, [range(1)] * 3),
    ],
)
def test_ranks_hold_the_heads_of_the_design(num_kv_heads: int, tp_size: int, expected: list[range]) -> None:
    shape = geometry(num_attention_heads=24, num_kv_heads=num_kv_heads)
    assert [shape.kv_heads_of_rank(rank, tp_size) for rank in range(tp_size)] == expected


@pytest.mark.parametrize(("tp_rank", "tp_size"), [(-1, 2), (2, 2), (0, 0), (0, -1)])
def test_rank_outside_its_group_is_refused(tp_rank: int, tp_size: int) -> None:
    with pytest.raises(GeometryError, match=f"tp_rank {tp_rank}"):
        geometry().kv_heads_of_rank(tp_rank, tp_size)


def test_stages_cut_the_layers_in_order_and_the_last_ones_take_the_remainder() -> None:
    for num_layers in range(1, 25):
        shape = geometry(num_layers=num_layers)
        for pp_size in range(1, num_layers + 1):
            stages = [shape.layers_of_stage(rank, pp_size) for rank in range(pp_size)]
            assert list(itertools.chain(*stages)) == list(range(num_layers))
            sizes = [len(stage) for stage in stages]
            assert sizes == sorted(sizes)
            assert sizes[-1] - sizes[0] <= 1


def test_stages_of_seven_layers_are_the_ones_worked_out_by_hand() -> None:
    stages = [geometry(num_layers=7).layers_of_stage(rank, 3) for rank in range(3)]
    assert stages == [range(0, 2), range(2, 4), range(4, 7)]
    stages = [geometry(num_layers=7).layers_of_stage(rank, 4) for rank in range(4)]
    assert stages == [range(0, 1), range(1, 3), range(3, 5), range(5, 7)]


@pytest.mark.parametrize(("pp_rank", "pp_size"), [(-1, 2), (2, 2), (0, 5), (0, 0), (0, -1)])
def test_stage_that_the_layers_cannot_fill_is_refused(pp_rank: int, pp_size: int) -> None:
    message = rf"pp_rank {pp_rank} of pp_size {pp_size} does not fit 4 layers; .*\(--pp-size\) may be 1 to 4"
    with pytest.raises(GeometryError, match=message):
        geometry().layers_of_stage(pp_rank, pp_size)


def test_row_shape_is_one_ranks() -> None:
    shape = geometry(num_kv_heads=4, head_dim=80, v_head_dim=96)
    whole = shape.row_shape()
    assert (whole.num_kv_heads, whole.k_layout.group_size, whole.v_layout.group_size) == (4, 80, 96)
    rank = shape.row_shape(tp_size=8, k_layout=ScaleLayout(40), v_layout=ScaleLayout(48))
    assert (rank.num_kv_heads, rank.head_dim, rank.v_head_dim) == (1, 80, 96)
    assert (rank.k_layout.group_size, rank.v_layout.group_size) == (40, 48)
    with pytest.raises(GeometryError, match="tp_size 3"):
        shape.row_shape(tp_size=3)


def test_unquantized_bytes_count_two_bytes_per_channel_of_a_rank() -> None:
    shape = geometry(num_layers=3, num_kv_heads=4, head_dim=80, v_head_dim=96)
    assert shape.bf16_bytes_per_token() == 3 * 4 * (80 + 96) * 2
    assert shape.bf16_bytes_per_token(tp_size=2) == 3 * 2 * (80 + 96) * 2
    assert shape.bf16_bytes_per_token(tp_size=8) == 3 * 1 * (80 + 96) * 2
    assert shape.row_shape().pair_bytes(PrecisionPair(16, 16)) * 3 == shape.bf16_bytes_per_token()


def test_geometry_is_rebuilt_from_its_plain_integers() -> None:
    shape = geometry(num_shared_layers=3)
    plain = shape.as_dict()
    assert ModelGeometry(**plain) == shape
    assert set(plain.values()) == {4, 8, 2, 64, 3}
    assert all(type(value) is int for value in plain.values())
