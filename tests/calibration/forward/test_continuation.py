"""A prompt that runs once: the rest of the sequence is what it is in one run of the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from kvtuner.calibration.forward import continuation, simulator
from kvtuner.calibration.forward.continuation import NO_PROMPT, PROMPT_BYTES, prompt_bytes, run_prompt
from kvtuner.calibration.forward.read_plan import AttentionCall, ReadPlan, attend
from kvtuner.calibration.forward.simulator import LayerSpec, Simulator
from kvtuner.calibration.isolated import forwards
from kvtuner.calibration.isolated.forwards import measure_isolated
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.calibration.sensitivity import Candidate
from kvtuner.calibration.transform_statistics import measure_constants
from kvtuner.quant import QuantSpec
from kvtuner.read_plan_names import READ_PLANS
from kvtuner.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import RandomBatches

    from kvtuner.calibration.forward.chain import DecoderChain

TOKENS, SPLIT = 23, 7


def test_tokens_after_the_prompt_run_as_in_the_whole_sequence(
    family: str, make_model: Callable[..., Any], chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    (batch,) = random_batches(2, TOKENS, batch_size=2)
    eager = make_model(family)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        logits = eager(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits[:, SPLIT:]
    chain = chain_of(family)
    prompt, trace = run_prompt(chain, batch, SPLIT)
    assert prompt.num_tokens == SPLIT
    assert all(hidden.shape[1] == TOKENS - SPLIT for hidden in trace.residual)
    torch.testing.assert_close(chain.logits(trace.final), logits.float(), rtol=1e-4, atol=1e-4)
    seen: list[AttentionCall] = []

    def hook(_: int, call: AttentionCall) -> Tensor:
        seen.append(call)
        return attend(call)

    again = chain.run(trace.residual[0], trace.calls, prompt.before(hook))
    assert torch.equal(again, trace.final)
    whole: list[AttentionCall] = []
    chain.trace(batch.input_ids, batch.position_ids, lambda _, call: (whole.append(call), attend(call))[1])
    for found, expected in zip(seen, whole, strict=True):
        torch.testing.assert_close(found.k, expected.k, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.v, expected.v, rtol=1e-4, atol=1e-5)
        assert found.first == SPLIT
        assert torch.equal(found.k[:, :, :SPLIT], expected.k[:, :, :SPLIT])


def test_its_bytes_are_those_of_its_keys_and_values(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    (batch,) = random_batches(2, TOKENS, batch_size=2)
    prompt, _ = run_prompt(chain_of("llama-gqa"), batch, SPLIT)
    geometry = chain_of("llama-gqa").geometry
    per_token = geometry.num_layers * geometry.num_kv_heads * (geometry.head_dim + geometry.v_head_dim)
    assert prompt.num_bytes == 2 * SPLIT * per_token * 4
    assert (NO_PROMPT.num_bytes, NO_PROMPT.num_tokens) == (0, 0)


@pytest.mark.parametrize("name", READ_PLANS)
@pytest.mark.parametrize("num_kept", [0, 1, 2])
def test_sequences_whose_prompt_is_not_kept_are_measured_alike(
    num_kept: int,
    name: str,
    chain_of: Callable[..., DecoderChain],
    random_batches: RandomBatches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain, plan = chain_of("qwen2-bias"), ReadPlan(name, 0 if name == "cache" else SPLIT)
    specs = {0: LayerSpec(QuantSpec(8), QuantSpec(4)), 1: LayerSpec(QuantSpec(4), QuantSpec(8))}
    kept = Simulator(chain, random_batches(3, TOKENS), plan)
    monkeypatch.setattr(simulator, "PROMPT_BYTES", num_kept * kept.prepare()[0].prompt.num_bytes)
    partly = Simulator(chain, random_batches(3, TOKENS), plan)
    tokens = [item.prompt.num_tokens for item in partly.prepare()]
    assert tokens == [plan.split] * num_kept + [0] * (3 - num_kept)
    expected, found = kept.measure(specs), partly.measure(specs)
    assert found.kl.shape == expected.kl.shape == (3, TOKENS - plan.split)
    # A product of another shape may flip a code.
    assert float(found.kl.mean()) == pytest.approx(float(expected.kl.mean()), rel=0.05)
    torch.testing.assert_close(found.nll, expected.nll, rtol=0.01, atol=0.01, equal_nan=True)
    assert (partly.measure({}).kl == 0).all()


def test_a_model_that_runs_otherwise_after_a_prompt_runs_whole(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_over(make_model("llama-gqa"))
    (batch,) = random_batches(1, TOKENS)

    def centre(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output - output.mean(dim=1, keepdim=True)  # looks at all tokens it is given, and not by attention

    chain.model.model.layers[1].mlp.register_forward_hook(centre)
    prompt, trace = run_prompt(chain, batch, SPLIT)
    assert prompt is NO_PROMPT
    assert torch.equal(trace.final, chain.trace(batch.input_ids, batch.position_ids).final)


@pytest.mark.parametrize(
    "name", ["gemma3", "gemma4-readers", "gpt-oss", "mimo-v2", "qwen3.5", "lfm2", "granite4", "falcon-h1"]
)
def test_prompts_of_models_whose_layers_differ_give_the_same_numbers_kept_or_not(
    name: str, make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A state depends on all tokens before, so that prompts are run again wherever a layer has one."""
    chain, plan = chain_over(make_model(name)), ReadPlan("decode", 30)
    specs = dict.fromkeys(chain.geometry.ids, LayerSpec(QuantSpec(2), QuantSpec(2)))
    batches = random_batches(2, 41)
    found = Simulator(chain, batches, plan)
    kept = [run_prompt(chain, batch, 30)[0].num_tokens for batch in batches]
    assert kept == ([0, 0] if chain.runs_prompts_again else [30, 30])
    scores = found.measure(specs)
    monkeypatch.setattr(continuation, "prompt_bytes", lambda *_: PROMPT_BYTES + 1)
    whole = Simulator(chain, batches, plan)
    assert [run_prompt(chain, batch, 30)[0].num_tokens for batch in batches] == [0, 0]
    expected = whole.measure(specs)
    assert expected.kl.mean() > 1e-4
    # A code at the edge of two may be another after sums in another order; states give the same bits.
    torch.testing.assert_close(
        scores.kl.mean(), expected.kl.mean(), rtol=0.0 if chain.runs_prompts_again else 0.05, atol=0.0
    )


def test_a_deep_model_in_bfloat16_is_measured_with_its_prompts_or_whole(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    model = make_model("llama-gqa", num_hidden_layers=32, initializer_range=0.15).to(torch.bfloat16)
    simulator = Simulator(chain_over(model), random_batches(2, TOKENS), ReadPlan("decode", SPLIT))
    assert (simulator.measure({}).kl == 0).all()
    spec = LayerSpec(QuantSpec(2), QuantSpec(2))
    assert simulator.kl(dict.fromkeys(range(32), spec)) > 0
    assert simulator.prepare()[0].prompt.num_bytes in (
        0,
        prompt_bytes(simulator.chain, simulator.prepare()[0].batch, SPLIT),
    )


def test_an_isolated_forward_needs_no_prompt(
    chain_of: Callable[..., DecoderChain],
    random_batches: RandomBatches,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain, batches, plan = chain_of("llama-gqa"), random_batches(2, TOKENS), ReadPlan("decode", SPLIT)
    constants = measure_constants(chain, batches)
    candidates = [Candidate(0, "k", 4, "none"), Candidate(2, "v", 2, "hadamard")]
    found = []
    for name, limit in (("kept", 1 << 30), ("whole", 0)):
        monkeypatch.setattr(forwards, "PROMPT_BYTES", limit)
        folder = RunFolder(tmp_path / name)
        folder.create()
        found.append(
            measure_isolated(
                chain,
                batches,
                candidates,
                constants,
                plan=plan,
                options=QuantizationOptions(),
                folder=folder,
                identity=name,
            )
        )
    for candidate in candidates:
        assert found[1][candidate] == pytest.approx(found[0][candidate], rel=0.05)
