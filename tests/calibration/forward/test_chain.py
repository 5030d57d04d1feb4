"""Decoders as chains of layers, against the models' own forward with transformers' eager attention."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from tiny.layered_models import LAYERED, MULTIMODAL
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from kvtuner.calibration.forward.attention_hook import hooked, register_hook
from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.calibration.forward.read_plan import AttentionCall, attend
from kvtuner.errors import NonFiniteActivationError, UnsupportedModelError
from kvtuner.geometry import ModelGeometry
from kvtuner.layer_geometry import CacheGeometry, LayerGeometry, LayerKind
from kvtuner.supported_models import read_cache_geometry

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import ModelFolder, RandomBatches

    from kvtuner.calibration.batches import Batch

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WIDE = {**SMALL, "intermediate_size": 96, "num_key_value_heads": 2}
# What the families of `model_folder` lack: logit caps and scales, attention caps, parallel blocks, learned positions.
STRANGERS: dict[str, dict[str, Any]] = {
    "Gemma2": {**WIDE, "head_dim": 16, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "Cohere": {**WIDE, "logit_scale": 0.3},
    "Granite": {
        **WIDE,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.4,
        "embedding_multiplier": 2.0,
    },
    "StableLm": WIDE,
    "Olmo2": WIDE,
    "GPTNeoX": {**SMALL, "intermediate_size": 96},
    "OPT": {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.12},
    "GPT2": {
        **{key: value for key, value in SMALL.items() if key in ("vocab_size", "initializer_range")},
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}


REFUSED = {
    "zamba2": r"Zamba2ForCausalLM has no attention hook in every layer.*calls came from layers \[-1, -1\]",
}
"""Models whose layers are no chain for a reason of their own."""


def exactly(layer_id: int, call: AttentionCall) -> Tensor:
    return attend(call)


def assert_logits_agree(chain: DecoderChain, eager: Any, batch: Batch) -> None:
    with torch.no_grad():
        expected = eager(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    trace = chain.trace(batch.input_ids, batch.position_ids)
    assert expected.std() > 0.02
    torch.testing.assert_close(chain.logits(trace.final), expected.float(), rtol=1e-5, atol=1e-5)


def test_logits_through_the_chain_are_those_of_eager_attention(
    family: str, chain_of: Callable[..., DecoderChain], model_folder: ModelFolder, random_batches: RandomBatches
) -> None:
    eager = AutoModelForCausalLM.from_pretrained(model_folder(family), attn_implementation="eager", dtype=torch.float32)
    assert_logits_agree(chain_of(family), eager, *random_batches(3, 41, batch_size=3))


@pytest.mark.parametrize("name", STRANGERS)
def test_models_of_other_shapes_run_as_chains_unchanged(
    name: str, chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**STRANGERS[name])
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    eager = getattr(transformers, f"{name}{head}")(config).eval()
    eager.set_attn_implementation("eager")
    assert_logits_agree(chain_over(copy.deepcopy(eager)), eager, *random_batches(2, 23, batch_size=2))


def test_running_from_any_layer_gives_the_whole_models_final_states(
    family: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_of(family)
    (batch,) = random_batches(2, 19, batch_size=2)
    trace = chain.trace(batch.input_ids, batch.position_ids)
    assert len(trace.residual) == len(chain.layers)
    for layer_id, residual in enumerate(trace.residual):
        assert torch.equal(chain.run(residual, trace.calls, exactly, start=layer_id), trace.final)


def test_the_first_residual_is_the_embedding_and_the_last_norm_gives_the_final_states(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_of("llama-gqa")
    (batch,) = random_batches(1, 9)
    trace = chain.trace(batch.input_ids, batch.position_ids)
    embedding = chain.model.get_input_embeddings()(batch.input_ids)
    assert torch.equal(trace.residual[0], embedding)
    last = chain.run_layer_exactly(2, trace.residual[2], trace.calls[2])
    assert torch.equal(chain.finish(last), trace.final)
    assert torch.equal(chain.model.model.norm(last), trace.final)


def test_a_hook_that_changes_one_layer_gives_the_same_from_there_on_as_in_the_whole_model(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_of("llama-gqa")
    (batch,) = random_batches(2, 17, batch_size=2)

    def spoil_layer_1(layer_id: int, call: AttentionCall) -> Tensor:
        return attend(call) * (0.5 if layer_id == 1 else 1.0)

    exact = chain.trace(batch.input_ids, batch.position_ids)
    spoiled = chain.trace(batch.input_ids, batch.position_ids, spoil_layer_1)
    assert torch.equal(spoiled.residual[1], exact.residual[1])
    assert not torch.allclose(spoiled.residual[2], exact.residual[2])
    rerun = chain.run(exact.residual[1], exact.calls, spoil_layer_1, start=1)
    assert torch.equal(rerun, spoiled.final)


def test_every_layer_run_is_counted_in_tokens(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_of("llama-gqa")
    (batch,) = random_batches(2, 10, batch_size=2)
    before = chain.count.layer_tokens
    trace = chain.trace(batch.input_ids, batch.position_ids)
    assert chain.count.layer_tokens - before == 3 * 20
    chain.run(trace.residual[1], trace.calls, exactly, start=1)
    assert chain.count.layer_tokens - before == 3 * 20 + 2 * 20


def test_tracing_leaves_no_hooks_behind(chain_of: Callable[..., DecoderChain], random_batches: RandomBatches) -> None:
    chain = chain_of("llama-gqa")
    (batch,) = random_batches(1, 8)

    def fail(layer_id: int, call: AttentionCall) -> Tensor:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        chain.trace(batch.input_ids, batch.position_ids, fail)
    modules = list(chain.model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def rebuilt_as(decoder_class: type[nn.Module], make_model: Callable[..., Any]) -> Any:
    """A tiny Llama whose decoder runs another forward."""
    model = make_model("llama-gqa")
    model.model.__class__ = decoder_class
    return model


class _Decoder(transformers.LlamaModel):
    """LlamaModel's forward in a few lines, to be bent by subclasses."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> BaseModelOutputWithPast:
        hidden = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(hidden, position_ids)
        for number, layer in self.in_order():
            hidden = layer(self.between(number, hidden, input_ids), position_embeddings=rotary)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    def in_order(self) -> list[tuple[int, nn.Module]]:
        return list(enumerate(self.layers))

    def between(self, number: int, hidden: Tensor, input_ids: Tensor) -> Tensor:
        return hidden


class _EmbeddingAgain(_Decoder):
    def between(self, number: int, hidden: Tensor, input_ids: Tensor) -> Tensor:
        return hidden + self.embed_tokens(input_ids) if number == 2 else hidden


class _Backwards(_Decoder):
    def in_order(self) -> list[tuple[int, nn.Module]]:
        return list(enumerate(self.layers))[::-1]


class _Twice(_Decoder):
    def in_order(self) -> list[tuple[int, nn.Module]]:
        layers = list(enumerate(self.layers))
        return [*layers, layers[-1]]


class _Deaf(nn.Module):
    """Attention that never calls the interface."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states, None


class _Doubled(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


class _Uncapped(transformers.Gemma2ForCausalLM):
    """Gemma 2 without the cap of logits that its configuration has, as classes that read images leave it out."""

    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(*args, **kwargs).last_hidden_state))


@pytest.mark.parametrize(("dtype", "cap"), [(torch.float32, 400.0), (torch.bfloat16, 20.0)])
@pytest.mark.parametrize("is_capped", [True, False])
def test_a_cap_that_the_logits_of_the_probe_hardly_feel_is_there_where_the_model_has_it(
    is_capped: bool, dtype: torch.dtype, cap: float, chain_over: Callable[..., DecoderChain]
) -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**{**STRANGERS["Gemma2"], "final_logit_softcapping": cap})
    chain = chain_over((transformers.Gemma2ForCausalLM if is_capped else _Uncapped)(config).to(dtype).eval())
    final = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        plain = chain.head(200 * final).float()
        assert plain.abs().max() > cap
        expected = cap * torch.tanh(plain / cap) if is_capped else plain
        torch.testing.assert_close(chain.logits(200 * final), expected)


def test_the_bent_decoders_differ_from_a_plain_chain_in_their_bend_alone(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain]
) -> None:
    assert len(chain_over(rebuilt_as(_Decoder, make_model)).layers) == 3


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (_EmbeddingAgain, "layer 2 does not read layer 1's output alone"),
        (_Backwards, r"no attention hook in every layer.*\[2, 1, 0\]"),
        (_Twice, r"3 layers are expected.*once each.*\[0, 1, 2, 2\]"),
    ],
)
def test_a_decoder_that_is_no_chain_is_refused(
    decoder: type[nn.Module], message: str, make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain]
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        chain_over(rebuilt_as(decoder, make_model))


def test_a_layer_whose_attention_goes_past_the_hook_is_refused(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain]
) -> None:
    model = make_model("llama-gqa")
    model.model.layers[1].self_attn = _Deaf()
    with pytest.raises(UnsupportedModelError, match=r"no attention hook in every layer.*\[0, 2\]"):
        chain_over(model)


def test_logits_that_are_not_the_output_embeddings_are_refused(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain]
) -> None:
    model = make_model("llama-gqa")
    model.__class__ = _Doubled
    with pytest.raises(UnsupportedModelError, match="logits are not the output embeddings"):
        chain_over(model)


def test_a_layer_with_other_keys_than_those_it_should_read_is_refused(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain]
) -> None:
    """Code that does not know the field of its configuration makes keys in every layer."""
    model = make_model("llama-gqa")
    model.config.num_kv_shared_layers = 1
    with pytest.raises(UnsupportedModelError, match=r"layer 2 has kind shared:1 .* reads other keys and values than"):
        chain_over(model)
    bent = make_model("gemma4-readers")
    layers = list(read_cache_geometry(bent.config).layers)
    layers[6] = LayerGeometry(LayerKind("shared", 0))
    bent.set_attn_implementation(register_hook())
    with pytest.raises(UnsupportedModelError, match=r"layer 6 has kind shared:0 .* than layer 0's"):
        DecoderChain(bent, CacheGeometry(tuple(layers)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 4}, "no list of 4 decoder layers"),
        ({"num_kv_heads": 4}, r"layer 0 has .* = \(4, 2, 16, 16\), its configuration says \(4, 4, 16, 16\)"),
        ({"v_head_dim": 32}, r"\(4, 2, 16, 16\), its configuration says \(4, 2, 16, 32\)"),
    ],
)
def test_heads_that_differ_from_the_configuration_are_refused(
    changes: dict[str, int], message: str, make_model: Callable[..., Any]
) -> None:
    model = make_model("llama-gqa")
    model.set_attn_implementation(register_hook())
    with pytest.raises(UnsupportedModelError, match=message):
        DecoderChain(model, replace(ModelGeometry.from_config(model.config), **changes))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("layers.1.self_attn.k_proj", "layer 1: its keys hold NaN or infinity"),
        ("layers.2.self_attn.v_proj", "layer 2: its values hold NaN or infinity"),
        ("layers.0.mlp.up_proj", "layer 0: its outputs hold NaN or infinity"),
        ("layers.0.mlp.down_proj", "layer 0: its outputs hold NaN or infinity"),
        ("embed_tokens", "layer 0: its inputs hold NaN or infinity"),
        ("layers.2.mlp.down_proj", "layer 2: its outputs hold NaN or infinity"),
    ],
)
def test_broken_weights_are_an_error_that_names_the_layer(
    weight: str, message: str, value: float, make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain]
) -> None:
    model = make_model("llama-gqa")
    with torch.no_grad():
        model.model.get_submodule(weight).weight[3] = value
    with pytest.raises(NonFiniteActivationError, match=message):
        chain_over(model)


@pytest.mark.parametrize("name", [*LAYERED, *MULTIMODAL])
def test_models_whose_layers_differ_run_as_chains_unchanged(
    name: str, make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    """Sequences are longer than the windows; with eager attention transformers has caps and sinks of its own."""
    eager = make_model(name)
    eager.set_attn_implementation("eager")
    if name in REFUSED:
        with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
            chain_over(copy.deepcopy(eager))
        return
    chain = chain_over(copy.deepcopy(eager))
    (batch,) = random_batches(2, 41, batch_size=2)
    with torch.no_grad():
        expected = eager(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        short = eager(batch.input_ids[:, 20:], position_ids=batch.position_ids[:, 20:], use_cache=False).logits
    trace = chain.trace(batch.input_ids, batch.position_ids)
    assert expected.std() > 0.02
    torch.testing.assert_close(chain.logits(trace.final), expected.float(), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(short[:, -1], expected[:, -1], atol=1e-4), "tokens before the window change nothing"
    start = chain.geometry.ids[-1]
    assert torch.equal(chain.run(trace.residual[start], trace.calls, exactly, start=start), trace.final)
    kinds = [layer.kind.name for layer in chain.cache.layers]
    assert [kinds[layer] for layer in chain.geometry.ids] == ["full"] * chain.geometry.num_layers
    assert chain.runs_prompts_again == any(kind == "none" for kind in kinds) or name == "falcon-h1"


def test_heads_of_windows_are_those_that_attention_has(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain]
) -> None:
    """MiMo's layers with windows have twice the KV heads that its configuration says."""
    chain = chain_over(make_model("mimo-v2"))
    assert [(str(layer.kind), layer.num_kv_heads) for layer in chain.cache.layers[:2]] == [
        ("window:24", 4),
        ("full", 2),
    ]


def test_a_window_that_the_configuration_says_and_attention_lacks_is_refused(make_model: Callable[..., Any]) -> None:
    model = make_model("llama-gqa")
    model.set_attn_implementation(register_hook())
    layers = list(CacheGeometry.of(ModelGeometry.from_config(model.config)).layers)
    layers[1] = replace(layers[1], kind=LayerKind("window", 8))
    with pytest.raises(UnsupportedModelError, match=r"layer 1 has kind window:8 by its configuration, but .* none"):
        DecoderChain(model, CacheGeometry(tuple(layers)))


def test_code_of_a_model_that_breaks_on_the_probe_is_an_error_in_one_line(make_model: Callable[..., Any]) -> None:
    model = make_model("llama-gqa")
    model.set_attn_implementation(register_hook())
    model.model.norm.weight = nn.Parameter(torch.ones(3))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM cannot be run layer by layer: RuntimeError: "):
        DecoderChain(model, ModelGeometry.from_config(model.config))


def test_attention_outside_a_hooked_block_is_exact(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_of("llama-gqa")
    (batch,) = random_batches(1, 12)
    trace = chain.trace(batch.input_ids, batch.position_ids)
    with torch.no_grad():
        plain = chain.model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        with hooked(exactly):
            heard = chain.model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    assert torch.equal(plain, heard)
    assert torch.equal(plain, chain.logits(trace.final))
