"""Simulated caches, against transformers' own cache fed token by token with what a reader would see."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from oracles.quantized_reads import served_logits
from torch.nn.functional import cross_entropy

from kvtuner.calibration.forward import simulator as simulate
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.forward.simulator import LayerSpec, Simulator, read_back
from kvtuner.calibration.kl import TokenScores
from kvtuner.calibration.transform_statistics import measure_constants
from kvtuner.errors import NonFiniteActivationError
from kvtuner.precision import NO_WINDOW, ExactWindow
from kvtuner.quant import QuantSpec
from kvtuner.read_plan_names import READ_PLANS

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import RandomBatches

    from kvtuner.calibration.forward.chain import DecoderChain

TOKENS, SPLIT = 23, 7


def plan_of(name: str) -> ReadPlan:
    return ReadPlan(name, 0 if name == "cache" else SPLIT)


def uniform(bits: tuple[int, int], num_layers: int, **options: Any) -> dict[int, LayerSpec]:
    spec = LayerSpec(QuantSpec(bits[0], **options), QuantSpec(bits[1], **options))
    return dict.fromkeys(range(num_layers), spec)


@pytest.fixture(scope="module")
def double(make_model: Callable[..., Any]) -> Callable[[str], Any]:
    """A model in float64 with eager attention: one float32 quantizer sees equal inputs on both sides."""

    def make(name: str) -> Any:
        model = make_model(name).double()
        model.set_attn_implementation("eager")
        return model

    return make


WINDOWS = (NO_WINDOW, ExactWindow(5), ExactWindow(SPLIT + 2, 2), ExactWindow(0, 3))
# The queries of one chunk of `hit` read different copies, which this host cannot give: test_read_plan.py has that.
PLANS_AND_WINDOWS = [
    (name, window) for name in READ_PLANS for window in WINDOWS if name != "hit" or window == NO_WINDOW
]


@pytest.mark.parametrize(("name", "window"), PLANS_AND_WINDOWS, ids=str)
@pytest.mark.parametrize("model", ["qwen2-bias", "head-dim-80"])
def test_simulation_is_a_teacher_forced_run_on_a_quantized_cache(
    model: str,
    name: str,
    window: ExactWindow,
    double: Callable[[str], Any],
    chain_over: Callable[..., DecoderChain],
    random_batches: RandomBatches,
) -> None:
    plan, (batch,) = plan_of(name), random_batches(2, TOKENS, batch_size=2)
    chain = chain_over(double(model))
    constants = measure_constants(chain, [batch])
    specs = {
        0: LayerSpec(QuantSpec(4, constants[0].transform("k", "centered+balanced+hadamard")), QuantSpec(2), window),
        1: LayerSpec(QuantSpec(2, group_size=chain.geometry.head_dim // 2, symmetric=True), QuantSpec(8, fp8=True)),
    }
    host = double(model)
    with torch.no_grad():
        exact = host(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits[:, plan.split :]
    served = served_logits(host, batch, specs, plan)[:, plan.split :]
    log_p, log_q = exact.log_softmax(-1), served.log_softmax(-1)
    scores = Simulator(chain, [batch], plan).measure(specs)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert kl.mean() > 1e-3
    # Logits are compared in float32.
    torch.testing.assert_close(scores.kl, kl, rtol=1e-4, atol=1e-6)
    assert torch.equal(scores.agree, (log_p.argmax(-1) == log_q.argmax(-1)).double())
    targets = batch.input_ids[:, plan.split + 1 :]
    expected = cross_entropy(served[:, :-1].flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(scores.nll[:, :-1].flatten(), expected, rtol=1e-5, atol=1e-5)


def test_likelihood_of_the_exact_model_is_torchs_cross_entropy(
    family: str, make_model: Callable[..., Any], chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    (batch,) = random_batches(2, TOKENS, batch_size=2)
    eager = make_model(family)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        logits = eager(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    expected = cross_entropy(logits[:, SPLIT:-1].flatten(0, 1), batch.input_ids[:, SPLIT + 1 :].flatten())
    scores = Simulator(chain_of(family), [batch], plan_of("decode")).measure({})
    assert scores.nll.shape == (2, TOKENS - SPLIT)
    assert float(scores.nll[:, :-1].mean()) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("name", READ_PLANS)
def test_a_cache_of_16_bits_does_not_diverge_at_all(
    name: str, family: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_of(family)
    simulator = Simulator(chain, random_batches(3, TOKENS, batch_size=2), plan_of(name))
    for specs in ({}, {0: LayerSpec()}, dict.fromkeys(range(chain.geometry.num_layers), LayerSpec(None, None))):
        scores = simulator.measure(specs)
        assert (scores.kl == 0).all()
        assert (scores.agree == 1).all()
        assert simulator.kl(specs) == 0.0
    for item in simulator.prepare():  # nor does a run of it
        run = chain.run(item.embedded, item.calls, item.prompt.before(simulate.quantized_attention({}, simulator.plan)))
        assert torch.equal(run[:, simulator.plan.split - item.prompt.num_tokens :], item.reference.final)


@pytest.mark.parametrize("name", READ_PLANS)
def test_divergence_grows_as_bits_fall(
    name: str, family: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_of(family)
    simulator = Simulator(chain, random_batches(3, TOKENS), plan_of(name))
    layers = chain.geometry.num_layers
    k8v8, k4v4, k2v2 = (simulator.kl(uniform((bits, bits), layers)) for bits in (8, 4, 2))
    assert 0 < k8v8 < k4v4 < k2v2
    k4_alone = simulator.kl(dict.fromkeys(range(layers), LayerSpec(k=QuantSpec(4))))
    v4_alone = simulator.kl(dict.fromkeys(range(layers), LayerSpec(v=QuantSpec(4))))
    assert 0 < k4_alone < k2v2
    assert 0 < v4_alone < k2v2


def test_more_tokens_that_read_quantized_diverge_more(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain, batches = chain_of("llama-gqa"), random_batches(4, TOKENS)
    late = {
        name: Simulator(chain, batches, plan_of(name)).measure(uniform((2, 2), 3)).kl[:, -(TOKENS - SPLIT) :]
        for name in READ_PLANS
    }
    assert late["hit"].mean() < late["decode"].mean() < 1.2 * late["cache"].mean()
    assert late["cache"].shape == late["hit"].shape


def test_sequences_run_together_are_scored_as_if_alone(
    double: Callable[[str], Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_over(double("qwen2-bias"))
    found = [
        Simulator(chain, random_batches(5, TOKENS, batch_size=size), plan_of("decode")).measure(uniform((4, 2), 2))
        for size in (1, 2, 5)
    ]
    for other in found[1:]:
        torch.testing.assert_close(other.kl, found[0].kl, rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(other.nll, found[0].nll, rtol=1e-5, atol=1e-9, equal_nan=True)
        assert torch.equal(other.agree, found[0].agree)


def different(layers: int, *bits: int) -> dict[int, LayerSpec]:
    """Objects of their own for each layer."""
    return {layer: LayerSpec(QuantSpec(bits[layer % len(bits)]), QuantSpec(2)) for layer in range(layers)}


@pytest.mark.parametrize("name", READ_PLANS)
def test_layers_that_configurations_begin_with_alike_run_once_and_results_are_the_same_bits(
    name: str, family: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_of(family, num_hidden_layers=4)
    batches, plan = random_batches(3, TOKENS, batch_size=2), plan_of(name)
    first, other = different(4, 2, 4), different(4, 8, 2)
    alike = [first, {**first, 3: other[3]}, {**first, 1: other[1]}, {**other, 0: first[0]}, {0: first[0]}, first]
    plain, sharing = Simulator(chain, batches, plan), Simulator(chain, batches, plan, reuse=True)
    expected = [plain.measure(specs) for specs in alike]
    sharing.prepare()
    before = chain.count.layer_tokens
    found = []
    layers_run = []
    for specs in alike:
        found.append(sharing.measure(specs))
        layers_run.append((chain.count.layer_tokens - before) // (3 * (TOKENS - plan.split)))
        before = chain.count.layer_tokens
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.kl, theirs.kl)
        assert torch.equal(ours.nll[:, :-1], theirs.nll[:, :-1])
    assert layers_run == [4, 1, 3, 2, 3, 1]


def test_configurations_of_other_objects_share_nothing(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_of("llama-gqa")
    simulator = Simulator(chain, random_batches(1, TOKENS), plan_of("decode"), reuse=True)
    simulator.prepare()
    for bits in (2, 4, 2):
        before = chain.count.layer_tokens
        simulator.measure(different(3, bits))
        assert chain.count.layer_tokens - before == 3 * (TOKENS - SPLIT)


def test_shared_layers_are_kept_within_their_bytes(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, batches = chain_of("llama-gqa"), random_batches(2, TOKENS)
    state = (TOKENS - SPLIT) * chain.model.config.hidden_size * 4
    monkeypatch.setattr(simulate, "REUSE_BYTES", 2 * 2 * state)
    simulator = Simulator(chain, batches, plan_of("decode"), reuse=True)
    common, rest = different(3, 2), different(3, 4)
    for specs in (common, rest, {**rest, 0: common[0]}):
        simulator.measure(specs)
        assert [item.shared.num_bytes for item in simulator.prepare()] == [2 * state] * 2
    assert all(item.shared.num_bytes == 0 for item in Simulator(chain, batches, plan_of("decode")).prepare())


def test_measuring_again_gives_the_same_bits(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    simulator = Simulator(chain_of("llama-gqa"), random_batches(2, TOKENS), plan_of("decode"))
    first, _, again = (simulator.measure(uniform((bits, 4), 3)) for bits in (2, 8, 2))
    assert torch.equal(first.kl, again.kl)
    assert simulator.kl(uniform((2, 4), 3)) == float(first.kl.mean())


def test_a_layer_alone_leaves_the_others_exact(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_of("llama-gqa")
    simulator = Simulator(chain, random_batches(2, TOKENS), plan_of("decode"))
    everywhere = simulator.kl(uniform((2, 2), 3))
    for layer in range(3):
        assert 0 < simulator.kl({layer: uniform((2, 2), 1)[0]}) < everywhere


def test_progress_is_told_in_tokens_and_work_in_forwards(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain, progress = chain_of("llama-gqa"), []
    simulator = Simulator(chain, random_batches(3, TOKENS, batch_size=2), plan_of("decode"))
    simulator.prepare()
    before = chain.count.layer_tokens
    scores = simulator.measure(uniform((4, 4), 3), progress.append)
    assert progress == [2 * TOKENS, TOKENS]
    assert chain.count.layer_tokens - before == 3 * 3 * (TOKENS - SPLIT)
    assert isinstance(scores, TokenScores)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("embed_tokens", "layer 0: its inputs hold NaN or infinity"),
        ("layers.0.mlp.down_proj", "layer 0: its outputs hold NaN or infinity"),
        ("layers.2.mlp.down_proj", "layer 2: its outputs hold NaN or infinity"),
    ],
)
def test_an_exact_run_that_is_not_finite_is_an_error_that_names_the_layer(
    weight: str,
    message: str,
    make_model: Callable[..., Any],
    chain_over: Callable[..., DecoderChain],
    random_batches: RandomBatches,
) -> None:
    (batch,) = random_batches(1, TOKENS)
    chain = chain_over(make_model("llama-gqa"))
    Simulator(chain, [batch], plan_of("decode")).prepare()
    with torch.no_grad():
        row = batch.input_ids[0, 0] if weight == "embed_tokens" else 3  # a token of the prompt, not scored itself
        chain.model.model.get_submodule(weight).weight[row] = torch.nan
    with pytest.raises(NonFiniteActivationError, match=message):
        Simulator(chain, [batch], plan_of("decode")).prepare()


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_the_layer_that_a_configuration_breaks_is_told(
    broken: int, make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_over(make_model("llama-gqa"))
    simulator = Simulator(chain, random_batches(3, TOKENS), plan_of("decode"))
    specs = {layer: LayerSpec(k=QuantSpec(4), v=QuantSpec(4)) for layer in range(3)}
    assert simulator.broken_layer(specs) is None
    outputs: list[torch.Tensor] = []

    def overflow(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        outputs.append(output)
        # Only the second sequence overflows.
        return output * torch.inf if len(outputs) == 2 else output

    chain.layers[broken].register_forward_hook(overflow)
    assert simulator.broken_layer(specs) == broken
    outputs.clear()
    assert simulator.broken_layer(specs, places=[0]) is None


def test_reading_back_quantizes_each_token_and_head_alone() -> None:
    x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0))
    read = read_back(QuantSpec(4), x)
    assert read.shape == x.shape
    for token in range(5):
        assert torch.equal(read[:, :, token : token + 1], read_back(QuantSpec(4), x[:, :, token : token + 1]))
    assert torch.equal(read[:, 1:2], read_back(QuantSpec(4), x[:, 1:2]))
    assert torch.equal(read_back(None, x.bfloat16()), x.bfloat16().float())


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 1 << 27])
def test_two_states_per_token_are_kept_and_of_a_small_vocabulary_its_logarithms(
    chain_of: Callable[..., DecoderChain],
    random_batches: RandomBatches,
    peak_bytes: Callable[[Callable[[], object]], int],
    monkeypatch: pytest.MonkeyPatch,
    kept: int,
) -> None:
    monkeypatch.setattr(simulate, "KEPT_BYTES", kept)
    tokens, width = 32, 1024
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    chain = chain_of("llama-gqa", num_hidden_layers=12, hidden_size=width, intermediate_size=16, **heads)
    peaks = {}
    for num_sequences in (4, 12):
        batches = random_batches(num_sequences, tokens)
        peaks[num_sequences] = peak_bytes(Simulator(chain, batches, plan_of("decode")).prepare)
    kept_tokens = tokens + tokens - SPLIT
    row = 4 * chain.vocab_size + 8 if kept else 0
    assert peaks[12] - peaks[4] <= 8 * (1.03 * kept_tokens * width * 4 + (tokens - SPLIT) * row)
    assert not kept or peaks[12] - peaks[4] > 8 * kept_tokens * width * 4


@pytest.mark.parametrize("room", [0, 2])
def test_a_run_holds_no_more_states_than_can_be_kept(
    room: int,
    chain_of: Callable[..., DecoderChain],
    random_batches: RandomBatches,
    peak_bytes: Callable[[Callable[[], object]], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    width, peaks = 1024, {}
    state = (TOKENS - SPLIT) * width * 4
    monkeypatch.setattr(simulate, "REUSE_BYTES", room * state)
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
    for depth in (6, 24):
        chain = chain_of("llama-gqa", num_hidden_layers=depth, hidden_size=width, intermediate_size=16, **heads)
        simulator = Simulator(chain, random_batches(1, TOKENS), plan_of("decode"), reuse=True)
        simulator.prepare()
        peaks[depth] = peak_bytes(partial(simulator.measure, different(depth, 4)))
        assert simulator.prepare()[0].shared.num_bytes == room * state
    assert peaks[24] - peaks[6] < state
