"""The stand-ins for SGLang's kernels of linear attention, against transformers' functions of the same name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from served_layers.stand_ins import load_stand_ins
from torch.nn import functional
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_code
from transformers.models.qwen3_next import modeling_qwen3_next as transformers_code

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

LENGTHS = (1, 64, 3, 130, 65)
STARTS = (0, 1, 2, 3, 6)
"""The numbers of the states in front of requests among those in front of every 64 tokens: 1, 1, 1, 3 and 2 of them."""
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, SLOTS = 2, 6, 16, 24, 9


@pytest.fixture(scope="module")
def stand_ins() -> ModuleType:
    return load_stand_ins("delta_rule_in_torch")


def states(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def inputs() -> dict[str, Any]:
    """Queries, keys, values and gates of requests of `LENGTHS`, one after the other, and the states of all slots."""
    tokens = sum(LENGTHS)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    return {
        "q": states(1, tokens, KEY_HEADS, KEY_DIM, seed=0),
        "k": states(1, tokens, KEY_HEADS, KEY_DIM, seed=1),
        "v": states(1, tokens, HEADS, VALUE_DIM, seed=2),
        "g": -functional.softplus(states(1, tokens, HEADS, seed=3)),
        "beta": states(1, tokens, HEADS, seed=4).sigmoid(),
        "initial_state": states(SLOTS, HEADS, VALUE_DIM, KEY_DIM, seed=5),
        "initial_state_indices": torch.tensor([4, 0, 8, 2, 7]),
        "cu_seqlens": ends,
    }


@pytest.mark.parametrize("function", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_requests_of_many_lengths_read_and_leave_what_transformers_does(
    function: str, stand_ins: ModuleType, inputs: dict[str, Any]
) -> None:
    reference = getattr(transformers_code, function)
    before = inputs["initial_state"].clone()
    read, _, kept = stand_ins.gated_delta_rule(**inputs, use_qk_l2norm_in_kernel=True)
    ends, slots = inputs["cu_seqlens"].tolist(), inputs["initial_state_indices"].tolist()
    for begin, end, slot in zip(ends, ends[1:], slots, strict=False):
        one = {name: inputs[name][:, begin:end] for name in ("q", "k", "v", "g", "beta")}
        q, k = (one.pop(name).repeat_interleave(HEADS // KEY_HEADS, dim=2) for name in ("q", "k"))
        expected, last = reference(
            q, k, one.pop("v"), **one, initial_state=before[slot][None].transpose(-1, -2), output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(read[:, begin:end], expected, rtol=1e-4, atol=1e-5)  # other orders of sums
        torch.testing.assert_close(inputs["initial_state"][slot], last[0].transpose(-1, -2), rtol=1e-4, atol=1e-5)
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert torch.equal(inputs["initial_state"][untouched], before[untouched])
    assert kept.shape == (1, 8, HEADS, VALUE_DIM, KEY_DIM)
    assert torch.equal(kept[0, STARTS], before[slots])


def test_a_state_kept_at_64_tokens_is_that_of_a_request_of_64(stand_ins: ModuleType, inputs: dict[str, Any]) -> None:
    _, _, kept = stand_ins.gated_delta_rule(**inputs, inplace_update=False)
    begin = int(inputs["cu_seqlens"][3])
    short = {name: inputs[name][:, begin : begin + 64] for name in ("q", "k", "v", "g", "beta")}
    own = inputs["initial_state"].clone()
    stand_ins.gated_delta_rule(
        **short, initial_state=own, initial_state_indices=torch.tensor([2]), cu_seqlens=torch.tensor([0, 64])
    )
    assert torch.equal(kept[0, 4], own[2])
    assert not torch.equal(own[2], inputs["initial_state"][2])


def test_a_step_of_many_requests_is_a_prompt_of_one_token_of_each(
    stand_ins: ModuleType, inputs: dict[str, Any]
) -> None:
    slots = torch.tensor([3, -1, 5, 1])  # one fills the batch
    q, k, v = (inputs[name][0, :4].flatten(1) for name in ("q", "k", "v"))
    a, b = states(4, HEADS, seed=6), states(4, HEADS, seed=7)
    decay, bias = states(HEADS, seed=8), states(HEADS, seed=9)
    table, out = inputs["initial_state"].clone(), torch.full((4, 1, HEADS, VALUE_DIM), torch.nan)
    stand_ins.gated_delta_rule_of_one_token(
        mixed_qkv=torch.cat((q, k, v), dim=1), a=a, b=b, A_log=decay, dt_bias=bias, scale=KEY_DIM**-0.5,
        initial_state=table, out=out, ssm_state_indices=slots, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    g = -decay.exp() * functional.softplus(a + bias)
    for request, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        q, k = (inputs[name][:, request : request + 1].repeat_interleave(3, dim=2) for name in ("q", "k"))
        before = inputs["initial_state"][slot][None].transpose(-1, -2)
        expected, last = transformers_code.torch_recurrent_gated_delta_rule(
            q, k, inputs["v"][:, request : request + 1], g=g[None, request : request + 1],
            beta=b[None, request : request + 1].sigmoid(), initial_state=before, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(out[request], expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(table[slot], last[0].transpose(-1, -2), rtol=1e-4, atol=1e-5)
    assert torch.equal(table[[0, 2, 4, 6, 7, 8]], inputs["initial_state"][[0, 2, 4, 6, 7, 8]])


@pytest.fixture
def gates() -> Any:
    """A layer's forget gates in Kimi Linear, of which the first projection is the identity."""
    config = kimi_code.KimiLinearConfig(hidden_size=KEY_DIM, linear_head_dim=KEY_DIM, linear_num_heads=HEADS)
    module = kimi_code.KimiLinearForgetGate(config).requires_grad_(False)
    module.f_a_proj.weight.copy_(torch.eye(KEY_DIM))
    module.f_b_proj.weight.copy_(states(HEADS * KEY_DIM, KEY_DIM, seed=6) / 4)
    module.dt_bias.copy_(states(HEADS * KEY_DIM, seed=7))
    module.A_log.copy_(states(1, 1, HEADS, 1, seed=8) / 2)
    return module


@pytest.mark.parametrize("function", ["recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"])
def test_channels_are_forgotten_each_at_its_pace_as_by_transformers(
    function: str, stand_ins: ModuleType, inputs: dict[str, Any], gates: Any
) -> None:
    inputs |= {name: states(1, sum(LENGTHS), HEADS, KEY_DIM, seed=seed) for seed, name in enumerate("qk")}
    hidden, raw = states(1, sum(LENGTHS), KEY_DIM, seed=9), inputs.pop("beta").logit()
    a, g = gates.f_b_proj(hidden).unflatten(-1, (HEADS, KEY_DIM)), gates(hidden)
    before, tracked = inputs["initial_state"].clone(), torch.full((5, HEADS, VALUE_DIM, KEY_DIM), torch.nan)
    read, kept = stand_ins.gated_delta_rule_by_channel(
        **{**inputs, "g": a, "beta": raw}, A_log=gates.A_log, dt_bias=gates.dt_bias, beta_is_raw=True,
        use_qk_l2norm_in_kernel=True, output_intermediate_states=True, track_state=tracked,
        track_chunk_idx=torch.tensor([0, -1, -1, 2, 1]),
    )  # fmt: skip
    ends, slots = inputs["cu_seqlens"].tolist(), inputs["initial_state_indices"].tolist()
    for begin, end, slot in zip(ends, ends[1:], slots, strict=False):
        q, k, v = (inputs[name][:, begin:end] for name in "qkv")
        expected, last = getattr(kimi_code, function)(
            q, k, v, g=g[:, begin:end], beta=raw[:, begin:end].sigmoid(), output_final_state=True,
            initial_state=before[slot][None].transpose(-1, -2), use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(read[:, begin:end], expected, rtol=1e-4, atol=1e-5)  # other orders of sums
        torch.testing.assert_close(inputs["initial_state"][slot], last[0].transpose(-1, -2), rtol=1e-4, atol=1e-5)
    assert torch.equal(kept[0, STARTS], before[slots])
    assert torch.equal(tracked[[0, 3, 4]], kept[0, [0, 5, 7]])
    assert tracked[1:3].isnan().all()


def test_a_step_by_channels_is_a_prompt_of_one_token_of_each(
    stand_ins: ModuleType, inputs: dict[str, Any], gates: Any
) -> None:
    slots, size = torch.tensor([3, -1, 5, 1]), (4, HEADS, KEY_DIM)  # one fills the batch
    q, k, v = states(*size, seed=0), states(*size, seed=1), inputs["v"][0, :4]
    hidden, raw = states(1, 4, KEY_DIM, seed=9), states(4, HEADS, seed=4)
    table, out = inputs["initial_state"].clone(), torch.full((4, 1, HEADS, VALUE_DIM), torch.nan)
    stand_ins.gated_delta_rule_by_channel_of_one_token(
        mixed_qkv=torch.cat([part.flatten(1) for part in (q, k, v)], dim=1), a=gates.f_b_proj(hidden)[0], b=raw,
        A_log=gates.A_log.flatten(), dt_bias=gates.dt_bias, scale=KEY_DIM**-0.5, initial_state=table, out=out,
        ssm_state_indices=slots, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    for request, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        one = slice(request, request + 1)
        expected, last = kimi_code.recurrent_kimi_delta_attention(
            q[None, one], k[None, one], v[None, one], g=gates(hidden)[:, one], beta=raw[None, one].sigmoid(),
            initial_state=inputs["initial_state"][slot][None].transpose(-1, -2), output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(out[request], expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(table[slot], last[0].transpose(-1, -2), rtol=1e-4, atol=1e-5)
    assert torch.equal(table[[0, 2, 4, 6, 7, 8]], inputs["initial_state"][[0, 2, 4, 6, 7, 8]])


def test_the_norm_behind_it_is_that_of_transformers(stand_ins: ModuleType) -> None:
    numbers, gate = states(5, HEADS, VALUE_DIM, seed=0), states(5, HEADS, VALUE_DIM, seed=1)
    norm = transformers_code.Qwen3NextRMSNormGated(VALUE_DIM, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    own = stand_ins.gated_norm(numbers, norm.weight, None, z=gate, eps=1e-3, is_rms_norm=True)
    torch.testing.assert_close(own, norm(numbers, gate), rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        stand_ins.gated_norm(numbers, norm.weight, None, z=gate, is_rms_norm=False)
