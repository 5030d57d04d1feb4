"""Models with latents, simulated: against transformers' own forward whose cache gives back quantized latents."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny.latent_models import LATENT, RANK, ROPE
from transformers import DynamicCache

from kvtuner.calibration.forward import continuation
from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.calibration.forward.continuation import PROMPT_BYTES, run_prompt
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.forward.simulator import LayerSpec, Simulator, quantized_attention
from kvtuner.errors import UnsupportedModelError
from kvtuner.layer_geometry import CacheGeometry, LayerGeometry, LayerKind
from kvtuner.precision import ExactWindow
from kvtuner.quant import QuantSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import RandomBatches
    from torch import Tensor

LATENT_LAYER = LayerGeometry(LayerKind("latent"), 4, 1, RANK, 0, ROPE)
TOKENS = 33


class QuantizedLatents(DynamicCache):
    """Transformers' own cache, but for latents, which it gives back as rows do from the first token on."""

    def __init__(self, config: Any, k: QuantSpec | None, v: QuantSpec | None, layers: tuple[int, ...]) -> None:
        super().__init__(config=config)
        self.specs, self.packed, self.shapes = (k, v), layers, set[tuple[int, ...]]()

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer_idx in self.packed:
            self.shapes |= {tuple(k.shape[1::2]), tuple(v.shape[1::2])}
            k, v = (
                x if spec is None else spec.simulate(x.transpose(1, 2)).transpose(1, 2).to(x.dtype)
                for spec, x in zip(self.specs, (k, v), strict=True)
            )
        return super().update(k, v, layer_idx, *args, **kwargs)


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize(("k", "v"), [(QuantSpec(4), None), (QuantSpec(2, group_size=16), None),
                                      (QuantSpec(8, fp8=True), QuantSpec(8, fp8=True))])  # fmt: skip
def test_quantized_latents_are_read_as_transformers_reads_them(
    name: str, k: QuantSpec, v: QuantSpec | None, make_model: Callable[..., Any],
    chain_over: Callable[..., DecoderChain],
) -> None:  # fmt: skip
    """What transformers caches here is the latent and the rotary channels, one head each, and nothing else."""
    model = make_model(name)
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    chain = chain_over(model)
    ids = torch.arange(2, 2 + 2 * TOKENS).reshape(2, -1)
    positions = torch.arange(TOKENS).expand(2, -1)
    layers = chain.geometry.ids
    assert {replace(chain.cache.layers[layer], index_dim=0) for layer in layers} == {LATENT_LAYER}
    cache = QuantizedLatents(own.config, k, v, layers)
    with torch.no_grad():
        expected = own(input_ids=ids, position_ids=positions, past_key_values=cache).logits
        exact = own(input_ids=ids, position_ids=positions).logits
    assert cache.shapes == {(1, RANK), (1, ROPE)}
    hook = quantized_attention(dict.fromkeys(layers, LayerSpec(k, v)), ReadPlan("cache", 0))
    found = chain.logits(chain.trace(ids, positions, hook).final)
    effect = (expected - exact).abs().max()
    assert effect > 1e-3
    # A code at the edge of two may be another after sums in another order.
    assert (found - expected).abs().mean() < 0.01 * effect


@pytest.mark.parametrize("name", ["deepseek-v2", "minicpm3", "kimi-linear", "deepseek-v32", "glm-moe-dsa"])
def test_prompts_are_kept_with_their_latents_or_run_again(
    name: str, make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    chain, plan = chain_over(make_model(name)), ReadPlan("decode", 30)
    specs = {layer: LayerSpec(QuantSpec(2), None, ExactWindow(3, 1)) for layer in chain.geometry.ids}
    batches = random_batches(2, 41)
    prompt, _ = run_prompt(chain, batches[0], 30)
    assert prompt.num_tokens == (0 if chain.runs_prompts_again else 30)
    assert prompt.num_bytes == (0 if chain.runs_prompts_again else continuation.prompt_bytes(chain, batches[0], 30))
    scores = Simulator(chain, batches, plan).measure(specs)
    monkeypatch.setattr(continuation, "prompt_bytes", lambda *_: PROMPT_BYTES + 1)
    expected = Simulator(chain, batches, plan).measure(specs)
    assert expected.kl.mean() > 1e-4
    torch.testing.assert_close(
        scores.kl.mean(), expected.kl.mean(), rtol=0.0 if chain.runs_prompts_again else 0.05, atol=0.0
    )


def test_a_tokens_exact_window_is_read_from_latents_as_they_came(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain, plan, batches = chain_over(make_model("deepseek-v3")), ReadPlan("cache", 0), random_batches(1, TOKENS)
    simulator = Simulator(chain, batches, plan)

    def kl(window: ExactWindow) -> float:
        return simulator.kl({layer: LayerSpec(QuantSpec(2), None, window) for layer in chain.geometry.ids})

    assert kl(ExactWindow(TOKENS)) < 1e-9 < kl(ExactWindow(8)) < kl(ExactWindow(0))


def test_a_layer_that_gives_its_cache_no_latent_is_refused(make_model: Callable[..., Any], chain_over: Any) -> None:
    """The configuration says that latents are cached; keys come, which no function expands, or others."""
    llama = chain_over(make_model("llama-gqa")).model
    with pytest.raises(UnsupportedModelError, match=r"layer 0 .* does not say how keys and values are made of it"):
        DecoderChain(llama, CacheGeometry((LATENT_LAYER,) * 3))
    other = LayerGeometry(LayerKind("latent"), 4, 1, 2 * RANK, 0, ROPE)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 caches a latent by its configuration, \(1, 64, 8\)"):
        DecoderChain(chain_over(make_model("deepseek-v3")).model, CacheGeometry((other,) * 3))
    odd = chain_over(make_model("deepseek-v2")).model
    attention = odd.model.layers[1].self_attn
    expand = attention.expand_kv
    calls = iter(range(1, 100))
    attention.expand_kv = lambda rows, rope: expand(rows * next(calls), rope)
    with pytest.raises(UnsupportedModelError, match="layer 1 reads other keys and values than those that it makes"):
        DecoderChain(odd, CacheGeometry((LATENT_LAYER,) * 2))


def test_a_model_whose_layers_attend_twice_is_refused(make_model: Callable[..., Any], chain_over: Any) -> None:
    fields = {"num_layers": 2, "kv_lora_rank": RANK, "q_lora_rank": 24, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "moe_topk": 2, "expert_ffn_hidden_size": 48, "ffn_hidden_size": 96}
    sizes = {"qk_rope_head_dim": ROPE, "head_dim": ROPE, "num_key_value_heads": 4, "num_hidden_layers": 4}
    model = make_model("LongcatFlash", **fields, **experts, **sizes)
    with pytest.raises(UnsupportedModelError, match="LongcatFlashForCausalLM has no list of 4 decoder layers"):
        chain_over(model)
