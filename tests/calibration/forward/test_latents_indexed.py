"""Latents of which an index selects what a query reads: whose selection it is, layer by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny.latent_models import INDEX, INDEXES, TOPK

from kvtuner.calibration.forward.chain import DecoderChain
from kvtuner.calibration.forward.read_plan import AttentionCall, ReadPlan, attend
from kvtuner.calibration.forward.simulator import LayerSpec, Simulator, quantized_attention
from kvtuner.errors import UnsupportedModelError
from kvtuner.layer_geometry import CacheGeometry
from kvtuner.quant import QuantSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import RandomBatches
    from torch import Tensor

    from kvtuner.calibration.forward.attention_hook import AttentionHook

TOKENS = 41
SHARED = "glm-moe-dsa"
"""The family whose layers 1 and 3 read what the indexes of layers 0 and 2 select."""


def keeping(selections: dict[int, Tensor], hook: AttentionHook) -> AttentionHook:
    """A hook that notes the tokens, sorted, that each layer's queries read, and attends by another one."""

    def attend_by(layer_id: int, call: AttentionCall) -> Tensor:
        assert call.selected is not None
        selections[layer_id] = call.selected.indices.sort().values
        return hook(layer_id, call)

    return attend_by


def exactly(_: int, call: AttentionCall) -> Tensor:
    return attend(call)


@pytest.mark.parametrize("name", INDEXES)
def test_logits_through_the_chain_are_those_of_eager_attention_under_the_index(
    name: str, make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    """The context is longer than what the index selects, and attention to all tokens gives others."""
    eager = make_model(name)
    eager.set_attn_implementation("eager")
    (batch,) = random_batches(2, TOKENS, batch_size=2)
    with torch.no_grad():
        expected = eager(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    chain, dense = chain_over(eager), chain_over(make_model(name, index_topk=TOKENS))
    found = chain.logits(chain.trace(batch.input_ids, batch.position_ids).final)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    of_all = dense.logits(dense.trace(batch.input_ids, batch.position_ids).final)
    torch.testing.assert_close(found[:, :TOPK], of_all[:, :TOPK], rtol=1e-4, atol=1e-4)
    assert (found - of_all)[:, TOPK:].abs().max() > 0.1
    assert sum(layer.index_dim for layer in chain.cache.layers) == INDEXES[name] * INDEX and chain.runs_prompts_again


@torch.no_grad()
def test_a_run_hands_on_what_its_own_indexes_select(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    """The model's own loop tells what is handed on; a run from a later layer begins with what was traced."""
    chain = chain_over(make_model(SHARED))
    (batch,) = random_batches(2, TOKENS, batch_size=2)
    specs = {layer: LayerSpec(QuantSpec(2), None) for layer in chain.geometry.ids}
    plan = ReadPlan("cache", 0)
    traced: dict[int, Tensor] = {}
    trace = chain.trace(batch.input_ids, batch.position_ids, keeping(traced, exactly))
    hook = quantized_attention(specs, plan)
    by_model: dict[int, Tensor] = {}
    expected = chain.trace(batch.input_ids, batch.position_ids, keeping(by_model, hook)).final
    found: dict[int, Tensor] = {}
    final = chain.run(trace.residual[0], trace.calls, keeping(found, hook))
    assert torch.equal(final, expected)
    for layer in range(4):
        assert torch.equal(found[layer], by_model[layer])
        # Layers 0 and 1 read by hidden states that saw nothing quantized.
        assert torch.equal(found[layer], traced[layer]) == (layer < 2)
        assert torch.equal(found[layer], found[layer // 2 * 2])
    for start in range(1, 4):
        again: dict[int, Tensor] = {}
        assert torch.equal(
            chain.run(trace.residual[start], trace.calls, keeping(again, exactly), start=start), trace.final
        )
        assert torch.equal(again[start], traced[start])
        isolated: dict[int, Tensor] = {}
        chain.run(trace.residual[start], trace.calls, keeping(isolated, hook), start=start)
        assert torch.equal(isolated[start], traced[start])


def test_a_trace_keeps_a_selection_where_a_layer_reads_it(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    """Layer 2 is handed what the index of layer 0 selects, and reads by its own."""
    chain = chain_over(make_model(SHARED))
    (batch,) = random_batches(2, TOKENS, batch_size=2)
    trace = chain.trace(batch.input_ids, batch.position_ids)
    shape = (2, TOKENS, TOPK)
    kept = [
        [name for name, value in call.kwargs.items() if isinstance(value, torch.Tensor) and value.shape == shape]
        for call in trace.calls
    ]
    assert [len(names) for names in kept] == [0, 1, 0, 1]
    assert kept[1] == kept[3] == list(trace.calls[2].handed)
    assert all(value is None or value.shape != shape for call in trace.calls for value in call.args)


def test_first_layers_that_configurations_share_give_the_same_numbers_beside_an_index(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    """Beyond layers 0 and 2 a hidden state is not enough: the next one reads what their index selects."""
    chain, plan, batches = chain_over(make_model(SHARED)), ReadPlan("decode", 10), random_batches(2, TOKENS)
    specs = [LayerSpec(QuantSpec(bits), None) for bits in (2, 4)]
    configurations = [
        dict(enumerate(specs[bit == "1"] for bit in f"{number:04b}")) for number in (0, 1, 2, 3, 7, 6, 14, 15)
    ]
    reused, whole = Simulator(chain, batches, plan, reuse=True), Simulator(chain, batches, plan)
    for configuration in configurations:
        assert torch.equal(reused.measure(configuration).kl, whole.measure(configuration).kl)
    shared = reused.prepare()[0].shared
    assert shared.longest([specs[0], specs[0], specs[1], specs[1]])[0] == 2


def test_an_index_that_the_configuration_does_not_say_is_refused(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain]
) -> None:
    chain = chain_over(make_model(SHARED))
    layers = list(chain.cache.layers)
    layers[0] = replace(layers[0], index_dim=8)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 has an index of keys of 8 channels .* keys of 16"):
        DecoderChain(chain.model, CacheGeometry(tuple(layers)))


def test_no_query_reads_a_later_token_that_an_index_selects(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain]
) -> None:
    chain = chain_over(make_model("deepseek-v32"))
    ids, positions = torch.arange(2, 2 + TOKENS).unsqueeze(0), torch.arange(TOKENS).unsqueeze(0)
    whole = chain.trace(ids, positions).final
    prefix = chain.trace(ids[:, :30], positions[:, :30]).final
    torch.testing.assert_close(whole[:, :30], prefix, rtol=1e-4, atol=1e-4)
