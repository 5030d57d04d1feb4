"""The attention hook: what functions see of models they know nothing about, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtuner.calibration.forward.attention_hook import IMPLEMENTATION, hooked, register_hook
from kvtuner.calibration.forward.read_plan import attend
from kvtuner.errors import UnsupportedModelError


def attention(module=None, tokens: int = 6, mask=None, **arguments):
    """Call the registered function as a layer would."""
    register_hook()
    q, k, v = torch.randn(1, 4, tokens, 8), torch.randn(1, 2, tokens, 8), torch.randn(1, 2, tokens, 8)
    module = SimpleNamespace(layer_idx=3) if module is None else module
    return ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION](module, q, k, v, mask, **arguments)


def test_hooks_see_keys_and_values_as_the_models_own_cache_holds_them(
    family, model_folder, load_tiny, random_batches
) -> None:
    (batch,) = random_batches(2, 24, batch_size=2)
    eager = AutoModelForCausalLM.from_pretrained(model_folder(family), attn_implementation="eager", dtype=torch.float32)
    cache = DynamicCache()
    with torch.no_grad():
        eager(batch.input_ids, position_ids=batch.position_ids, past_key_values=cache)
    seen = {}

    def hook(layer_id, call):
        seen[layer_id] = call
        return attend(call)

    with torch.no_grad(), hooked(hook):
        load_tiny(family).model(batch.input_ids, position_ids=batch.position_ids, use_cache=False)
    assert list(seen) == list(range(len(cache.layers)))
    for layer_id, call in seen.items():
        torch.testing.assert_close(call.k, cache.layers[layer_id].keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(call.v, cache.layers[layer_id].values, rtol=1e-5, atol=1e-5)
        assert call.q.shape[2] == 24
        assert call.softcap is None


def test_the_hook_is_gone_after_its_block_even_if_it_fails(load_tiny, random_batches) -> None:
    model = load_tiny().model
    (batch,) = random_batches(1, 8)
    with torch.no_grad():
        before = model(batch.input_ids, use_cache=False).logits

        def fail(layer_id, call):
            raise RuntimeError("hook")

        with pytest.raises(RuntimeError, match="hook"), hooked(fail):
            model(batch.input_ids, use_cache=False)
        assert torch.equal(model(batch.input_ids, use_cache=False).logits, before)


def test_the_innermost_hook_computes_attention() -> None:
    def constant(value):
        return lambda layer_id, call: torch.full_like(call.q, value)

    with hooked(constant(1.0)):
        with hooked(constant(2.0)):
            assert attention()[0].eq(2.0).all()
        assert attention()[0].eq(1.0).all()


def test_what_a_hook_returns_reaches_the_layer_with_heads_behind_tokens() -> None:
    marks = torch.arange(4.0).reshape(1, 4, 1, 1).expand(1, 4, 6, 8)
    with hooked(lambda layer_id, call: marks):
        output, weights = attention()
    assert weights is None
    assert torch.equal(output, marks.transpose(1, 2))
    assert output.is_contiguous()


def test_scaling_softcap_and_layer_reach_the_hook() -> None:
    seen = []
    with hooked(lambda layer_id, call: seen.append((layer_id, call.scaling, call.softcap)) or call.q):
        attention(scaling=0.7, softcap=30.0)
        attention()
    assert seen == [(3, 0.7, 30.0), (3, 8**-0.5, None)]


def test_registering_again_changes_nothing() -> None:
    assert register_hook() == register_hook() == IMPLEMENTATION


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (nn.Identity(), {}, "Identity has no layer_idx"),
        (SimpleNamespace(layer_idx=3, is_causal=False), {}, "layer 3 .* is not causal"),
        (None, {"is_causal": False}, "layer 3 .* is not causal"),
        (None, {"mask": torch.zeros(1, 1, 6, 6)}, "layer 3 .* builds its own attention mask"),
        (None, {"sinks": torch.zeros(4)}, "layer 3 .* has sinks"),
        (None, {"position_bias": torch.zeros(1)}, "layer 3 .* has position_bias"),
        (None, {"indices": torch.zeros(1)}, "layer 3 .* has indices"),
    ],
)
def test_attention_that_the_hook_cannot_carry_is_refused_by_name(module, arguments, message) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        attention(module, **arguments)


def test_a_window_and_attention_sinks_take_part_in_attention() -> None:
    torch.manual_seed(0)
    plain, windowed, beside_sinks = [], [], []
    for arguments, found in (({}, plain), ({"sliding_window": 5}, windowed), ({"s_aux": torch.ones(4)}, beside_sinks)):
        torch.manual_seed(1)
        found.append(attention(**arguments)[0])
    assert torch.allclose(windowed[0][:, :5], plain[0][:, :5], atol=1e-6)
    assert not torch.allclose(windowed[0][:, 5], plain[0][:, 5], atol=1e-3)
    assert (beside_sinks[0].abs().sum() < plain[0].abs().sum()).all()


def test_a_window_as_long_as_the_sequence_is_no_window() -> None:
    assert attention(sliding_window=6)[0].shape == (1, 6, 4, 8)


def test_arguments_that_change_nothing_are_accepted() -> None:
    found = attention(dropout=0.0, position_ids=torch.arange(6), use_cache=False, position_bias=None, s_aux=None)[0]
    assert found.shape == attention()[0].shape
