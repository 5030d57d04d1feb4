"""Gradients layer by layer, against one plain backward of autograd through the whole model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from oracles.naive_scores import assert_scores_agree, exact_call, naive_scores
from torch import Tensor

from kvtuner.calibration.candidate_pass import CandidateMeasurement
from kvtuner.calibration.candidates.layer_gradients import LayerGradients
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.calibration.sensitivity import Candidate, CandidateScores
from kvtuner.calibration.transform_statistics import balance, measure_constants
from kvtuner.precision import NO_WINDOW, ExactWindow

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import RandomBatches

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.forward.chain import DecoderChain

TOKENS, SPLIT, DRAWS, SEED = 19, 5, 3, 4
READERS = ("gemma4-readers", "gemma3n")


def whole_backward(chain: DecoderChain, batch: Batch, layer_id: int) -> Tensor:
    """Gradients of the losses of sampled labels by a layer's input, [draws, batch, tokens, hidden_size]."""
    taps: list[Tensor] = []

    def tap(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        taps.append(args[0].detach().requires_grad_())
        return (taps[0], *args[1:]), kwargs

    handle = chain.layers[layer_id].register_forward_pre_hook(tap, with_kwargs=True)
    with torch.enable_grad():
        logits = chain.model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    handle.remove()
    log_p = logits[:, SPLIT:].float().log_softmax(-1).flatten(0, 1)
    labels = torch.multinomial(log_p.detach().exp(), DRAWS, replacement=True, generator=generator())
    losses = [-log_p.gather(-1, labels[:, draw : draw + 1]).sum() for draw in range(DRAWS)]
    return torch.stack([torch.autograd.grad(loss, taps[0], retain_graph=True)[0] for loss in losses])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


@pytest.mark.parametrize(
    "name", ["llama-gqa", "gemma3", "lfm2", "deepseek-v3", "deepseek-v32", "glm-moe-dsa", *READERS]
)
def test_gradients_by_each_layers_input_are_those_of_the_whole_model(
    name: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    """Tolerance: float32 sums in another order."""
    chain, (batch,) = chain_of(name), random_batches(2, TOKENS, batch_size=2)
    trace, places = chain.trace(batch.input_ids, batch.position_ids), torch.arange(SPLIT, TOKENS)
    gradients = LayerGradients.of_labels(chain, trace, places, DRAWS, generator())
    for layer_id in reversed(range(len(chain.layers))):
        gradients.pass_layer(layer_id)
        expected = whole_backward(chain, batch, layer_id)
        if layer_id in chain.cache.readers and layer_id != chain.cache.owner_of(layer_id):
            assert expected.abs().max() > 0
        torch.testing.assert_close(torch.stack(gradients.by_output), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("window", [NO_WINDOW, ExactWindow(4), ExactWindow(1, 3)], ids=str)
@pytest.mark.parametrize("name", READERS)
def test_scores_of_a_layer_hold_what_all_that_read_it_see(
    name: str, window: ExactWindow, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    """Layer 0 reads itself, layers 4 and 6 read layer 2: its Fisher score and errors of outputs are sums over three."""
    chain, plan, options = chain_of(name), ReadPlan("decode", SPLIT), QuantizationOptions(window=window)
    (batch,) = batches = random_batches(2, TOKENS, batch_size=2)
    constants = measure_constants(chain, batches)
    measurement = CandidateMeasurement(chain, constants, plan, options, DRAWS, SEED, with_pairs=True)
    tokens_done: list[int] = []
    measurement.run(batches, tokens_done.append)
    found = measurement.scores()
    assert tokens_done == [2 * TOKENS] * 2
    assert {candidate.layer for candidate in found} == {layer for layer, _ in measurement.pairs()} == {0, 2}
    for side, bits, transform in (("k", 2, "none"), ("k", 4, "centered+balanced+hadamard"), ("v", 4, "hadamard")):
        for layer, readers in ((0, [0]), (2, [2, 4, 6])):
            candidate = Candidate(layer, side, bits, transform)
            parts = [
                naive_scores(chain, batch, candidate, constants, plan, options, reader=reader) for reader in readers
            ]
            sums = {name: sum(getattr(part, name) for part in parts) for name in ("e_a", "e_o", "fisher")}
            assert_scores_agree(found[candidate], CandidateScores(e_self=parts[0].e_self, **sums))


@pytest.mark.parametrize("name", READERS)
def test_lambda_weighs_the_queries_of_all_layers_that_read_a_key(
    name: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain, (batch,) = chain_of(name), random_batches(2, TOKENS, batch_size=2)
    constants = measure_constants(chain, [batch])
    calls = {layer: exact_call(chain, batch, layer) for layer in chain.cache.readers}
    for owner, readers in ((0, [0]), (2, [2, 4, 6])):
        keys = calls[owner].k.double().square().mean(dim=(0, 2)).sqrt()
        queries = torch.stack([calls[layer].q.double().unflatten(1, (2, 2)) for layer in readers])
        expected = balance(keys, queries.square().mean(dim=(0, 1, 3, 4)).sqrt())
        torch.testing.assert_close(constants[owner].lam, expected, rtol=2e-3, atol=0)
        alone = balance(keys, queries[0].square().mean(dim=(0, 2, 3)).sqrt())
        assert torch.allclose(alone, expected, rtol=2e-3) == (readers == [0])
