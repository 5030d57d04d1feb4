"""The hash of a configuration follows the network: every structural field changes it, nothing else does."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, Qwen2Config

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.identity.model_identity import (
    config_sha256,
    identity_of,
    max_positions,
    rope_sha256,
    tokenizer_sha256,
    weight_quantization,
)
from kvtuner.exported_configs.profile.load import load_profile

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import MakeTokenizer

    from kvtuner.exported_configs.profile.records import ModelIdentity

BOUNDED = settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
SIZES = {
    "vocab_size": [320, 321],
    "hidden_size": [64, 96],
    "intermediate_size": [96, 97],
    "num_hidden_layers": [2, 3],
    "num_attention_heads": [4, 2],
    "num_key_value_heads": [2, 1],
    "rms_norm_eps": [1e-6, 1e-5, 0.5],
    "tie_word_embeddings": [False, True],
}
STRUCTURE: dict[str, dict[str, list[Any]]] = {
    "Qwen2": {**SIZES, "hidden_act": ["silu", "gelu"]},
    "Mistral": {**SIZES, "hidden_act": ["silu", "gelu"], "sliding_window": [4096, None, 64]},
    "Llama": {
        **SIZES,
        "hidden_act": ["silu", "gelu"],
        "head_dim": [16, 32],
        "attention_bias": [False, True],
        "mlp_bias": [False, True],
    },
    "Gemma2": {
        **SIZES,
        "hidden_activation": ["gelu_pytorch_tanh", "silu"],
        "head_dim": [16, 32],
        "query_pre_attn_scalar": [256, 128],
        "sliding_window": [4096, 128],
        "final_logit_softcapping": [30.0, None, 29.5],
        "attn_logit_softcapping": [50.0, None],
        "layer_types": [["full_attention", "sliding_attention"], ["sliding_attention", "full_attention"]],
    },
}
"""Values of every field that decides the network, by hand: the first is not always the class's default."""
NOT_STRUCTURE: dict[str, list[Any]] = {
    "_name_or_path": ["", "somewhere/else"],
    "transformers_version": ["4.57.1", "9.9.9"],
    "architectures": [None, ["OtherForCausalLM"]],
    "dtype": [None, "float16", "bfloat16"],
    "use_cache": [True, False],
    "bos_token_id": [None, 1, 7],
    "eos_token_id": [None, 2, [3, 4]],
    "pad_token_id": [None, 0],
    "output_hidden_states": [False, True],
    "attention_dropout": [0.0, 0.25],
    "initializer_range": [0.02, 0.1],
    "max_position_embeddings": [512, 4096],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
    ],
    "quantization_config": [{"quant_method": "awq", "bits": 4}],
}


def config_of(family: str, values: dict[str, Any]) -> Any:
    """Fields are set after the rest was derived, so that one field is what differs."""
    config = getattr(transformers, f"{family}Config")()
    for name, value in values.items():
        setattr(config, name, value)
    return config


def some_of(fields: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in fields.items()})


@pytest.mark.parametrize("kind", STRUCTURE)
@given(data=st.data())
@BOUNDED
def test_two_configurations_hash_alike_exactly_if_their_structure_is_equal(kind: str, data: st.DataObject) -> None:
    sides = []
    for _ in range(2):
        structure = data.draw(some_of(STRUCTURE[kind]))
        config = config_of(kind, {**structure, **data.draw(some_of(NOT_STRUCTURE))})
        sides.append(([getattr(config, name) for name in STRUCTURE[kind]], config_sha256(config)))
    (a, a_hash), (b, b_hash) = sides
    assert (a == b) == (a_hash == b_hash)


@pytest.mark.parametrize("kind", STRUCTURE)
def test_every_structural_field_alone_changes_the_hash(kind: str) -> None:
    plain = config_of(kind, {})
    for name, values in STRUCTURE[kind].items():
        hashes = {json.dumps(getattr(plain, name)): config_sha256(plain)}
        for value in values:
            hashes[json.dumps(value)] = config_sha256(config_of(kind, {name: value}))
        assert len(set(hashes.values())) == len(hashes) > 1, name


def test_no_other_field_changes_the_hash() -> None:
    plain = config_sha256(config_of("Llama", {}))
    for name, values in NOT_STRUCTURE.items():
        for value in values:
            assert config_sha256(config_of("Llama", {name: value})) == plain, name


def test_the_positions_that_long_rotations_started_from_belong_to_the_rotations() -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}

    def phi(**values: Any) -> Any:
        shape = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
        return transformers.Phi3Config(**shape, rope_scaling=dict(factors), **values)

    near, far = (phi(original_max_position_embeddings=positions) for positions in (64, 128))
    assert config_sha256(near) == config_sha256(far)
    assert rope_sha256(near) != rope_sha256(far)
    late = phi(original_max_position_embeddings=64)
    late.rope_parameters.pop("original_max_position_embeddings")  # as a server's override leaves it
    assert rope_sha256(late) == rope_sha256(near)


def test_a_default_that_a_newer_transformers_adds_changes_nothing() -> None:
    class Newer(Qwen2Config):  # type: ignore[misc]  # transformers is untyped here
        gate_of_tomorrow: int = 7

    values = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    today = config_sha256(Qwen2Config(**values))
    newer = Newer(**values)
    assert newer.to_dict()["gate_of_tomorrow"] == 7
    assert config_sha256(newer) == today
    assert config_sha256(Newer(**values, gate_of_tomorrow=8)) != today


def test_what_a_server_notes_in_a_configuration_changes_nothing() -> None:
    config = Qwen2Config(hidden_size=64)
    before = config_sha256(config)
    config.context_len, config.v_head_dim, config.encoder_only = 512, 16, False
    assert config_sha256(config) == before


def test_the_order_and_the_type_of_numbers_change_nothing(tmp_path: Path) -> None:
    plain = {"model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 2, "query_pre_attn_scalar": 64}
    plain |= {"final_logit_softcapping": 25.0, "rope_theta": 5000, "vocab_size": 320}
    names = list(plain)
    random.Random(0).shuffle(names)
    hashes = set()
    for name, values in (("a", plain), ("b", {name: plain[name] for name in names} | {"rope_theta": 5000.0})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
        config = AutoConfig.from_pretrained(tmp_path / name)
        hashes.add((config_sha256(config), rope_sha256(config)))
        vars(config).update(query_pre_attn_scalar=64.0, final_logit_softcapping=25)  # as laxer releases read it
        hashes.add((config_sha256(config), rope_sha256(config)))
    assert len(hashes) == 1


def test_every_part_of_a_configuration_of_parts_counts() -> None:
    def config_of(text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **own: Any) -> Any:
        return transformers.Gemma3Config(
            text_config={"num_hidden_layers": 2, "hidden_size": 64, **(text or {})},
            vision_config={"num_hidden_layers": 2, **(vision or {})},
            **own,
        )

    different = [
        config_of(),
        config_of({"hidden_size": 96}),
        config_of(vision={"hidden_size": 96}),
        config_of(mm_tokens_per_image=64),
        config_of({"query_pre_attn_scalar": 32}),
    ]
    assert len({config_sha256(config) for config in different}) == len(different)
    same = [config_of({"max_position_embeddings": 99}), config_of({"rope_theta": 9.0}), config_of(image_token_index=5)]
    assert {config_sha256(config) for config in same} == {config_sha256(config_of())}
    assert rope_sha256(config_of({"rope_theta": 9.0})) != rope_sha256(config_of())
    assert max_positions(config_of({"max_position_embeddings": 99})) == 99


def rotated(**values: Any) -> str:
    return rope_sha256(Qwen2Config(hidden_size=64, num_attention_heads=4, max_position_embeddings=512, **values))


def test_rotary_parameters_are_one_however_they_are_written() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    old = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 512}
    assert rotated() == rotated(rope_theta=10000) == rotated(rope_parameters={"rope_theta": 10000.0})
    assert rotated(rope_scaling=yarn) == rotated(rope_scaling=old) == rotated(rope_scaling={**old, "beta_fast": None})
    config = Qwen2Config(hidden_size=64, num_attention_heads=4, max_position_embeddings=512)
    config.rope_parameters = {"rope_theta": 10000, "type": "default", **yarn, "original_max_position_embeddings": 512}
    assert rope_sha256(config) == rotated(rope_scaling=yarn)  # as SGLang leaves it
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": "default", "type": "linear", "factor": 2}
    assert rope_sha256(config) == rotated(rope_scaling={"rope_type": "linear", "factor": 2.0})


def test_other_rotations_hash_otherwise() -> None:
    different = [
        {},
        {"rope_theta": 10001.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ]
    assert len({rotated(**values) for values in different}) == len(different)
    sliding = {"rope_type": "default", "rope_theta": 5.0}
    text = transformers.Gemma3TextConfig
    by_kind = {"full_attention": {"rope_type": "default", "rope_theta": 9.0}, "sliding_attention": sliding}
    assert rope_sha256(text(rope_parameters=by_kind)) != rope_sha256(text())
    learned = transformers.GPT2Config()
    assert rope_sha256(learned) == rope_sha256(transformers.GPT2Config(n_positions=7)) != rotated()
    assert max_positions(learned) == 1024


def test_quantized_weights_are_named_in_either_form() -> None:
    assert weight_quantization(Qwen2Config()) is None
    for quantization, name in (
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        (transformers.AwqConfig(bits=4), "awq"),
        (transformers.BitsAndBytesConfig(load_in_4bit=True), "bitsandbytes"),
        ({"bits": 4}, "unnamed"),
    ):
        assert weight_quantization(Qwen2Config(quantization_config=quantization)) == name
    inner = transformers.Gemma3Config(text_config={"quantization_config": {"quant_method": "fp8"}})
    assert weight_quantization(inner) == "fp8"


def identity_with(config: Any = None, **changes: Any) -> ModelIdentity:
    fields: dict[str, Any] = {"id": "owner/name", "revision": None, "dtype": "bfloat16", **changes}
    return identity_of(Qwen2Config() if config is None else config, **fields)


def test_what_is_quantized_while_it_is_loaded_is_recorded() -> None:
    assert (identity_with().weight_quantization, identity_with().max_positions) == ("none", 32768)
    assert identity_with(quantized_by="fp8").weight_quantization == "fp8"
    awq = Qwen2Config(quantization_config={"quant_method": "awq"})
    assert identity_with(awq, quantized_by="awq_marlin").weight_quantization == "awq"


def test_the_checkpoint_s_class_is_the_architecture() -> None:
    assert identity_with(Qwen2Config(architectures=["Qwen2ForCausalLM"])).architecture == "Qwen2ForCausalLM"
    assert identity_with().architecture == "Qwen2Config"


def test_a_dtype_that_no_profile_holds_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"model\.dtype: must be 'bfloat16', 'float16' or 'float32', not 'int8'"):
        identity_with(dtype="int8")


def test_a_tokenizer_hashes_by_what_it_does(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    first = tokenizer_sha256(tokenizer)
    tokenizer(["a longer text", "b"], truncation=True, max_length=2, padding="max_length")
    assert tokenizer_sha256(tokenizer) == first
    assert identity_with(tokenizer=tokenizer).tokenizer_sha256 == first
    assert identity_with().tokenizer_sha256 is None
    tokenizer.chat_template = "{{ messages }}"
    templated = tokenizer_sha256(tokenizer)
    tokenizer.add_tokens(["<new>"])
    assert len({first, templated, tokenizer_sha256(tokenizer), tokenizer_sha256(make_tokenizer(adds_bos=True))}) == 4


class Slow:
    """A tokenizer in plain Python, as some checkpoints bring."""

    chat_template = None

    def __init__(self, **vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def get_added_vocab(self) -> dict[str, int]:
        return {}


def test_a_tokenizer_without_a_backend_hashes_by_its_vocabulary() -> None:
    assert tokenizer_sha256(Slow(a=0, b=1)) == tokenizer_sha256(Slow(b=1, a=0)) != tokenizer_sha256(Slow(a=1, b=0))


def test_a_profile_of_an_older_kvtuner_loads(document: dict[str, Any]) -> None:
    for name in ("rope_sha256", "weight_quantization", "tokenizer_sha256", "max_positions"):
        document["model"].pop(name, None)
    model = load_profile(json.dumps(document).encode()).model
    assert (model.rope_sha256, model.weight_quantization, model.tokenizer_sha256, model.max_positions) == (None,) * 4
