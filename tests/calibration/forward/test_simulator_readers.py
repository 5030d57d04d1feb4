"""Layers that read another one's keys and values, against transformers' own forward that hands them quantized ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from oracles.quantized_reads import served_logits

from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.forward.simulator import LayerSpec, Simulator, quantized_attention
from kvtuner.calibration.isolated.forwards import measure_isolated, spec_of
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.calibration.sensitivity import Candidate
from kvtuner.calibration.transform_statistics import measure_constants
from kvtuner.precision import NO_WINDOW, ExactWindow
from kvtuner.quant import QuantSpec
from kvtuner.read_plan_names import READ_PLANS
from kvtuner.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import RandomBatches

    from kvtuner.calibration.forward.chain import DecoderChain

TOKENS, SPLIT = 23, 7
READERS = ("gemma4-readers", "gemma3n")
"""Layers 4 and 6 read the keys of layer 2, layer 5 those of layer 3, which has a window; layer 0 is read by itself."""


def plan_of(name: str) -> ReadPlan:
    return ReadPlan(name, 0 if name == "cache" else SPLIT)


READINGS = [(name, NO_WINDOW) for name in READ_PLANS]
# Behind a hit the queries of one chunk read different copies, which a host that hands all of them one side cannot give.
READINGS += [(name, ExactWindow(5, 2)) for name in READ_PLANS if name != "hit"]


def double(make_model: Callable[..., Any], name: str) -> Any:
    """A model in float64 with eager attention: one float32 quantizer sees equal inputs on both sides."""
    model = make_model(name, sliding_window=8).double()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(("plan_name", "window"), READINGS, ids=str)
@pytest.mark.parametrize("name", READERS)
def test_readers_of_a_quantized_layer_read_what_a_host_hands_them(
    name: str,
    plan_name: str,
    window: ExactWindow,
    make_model: Callable[..., Any],
    chain_over: Callable[..., DecoderChain],
    random_batches: RandomBatches,
) -> None:
    """The host's cache reads back what its owner stores; transformers hands that to the readers."""
    plan, (batch,) = plan_of(plan_name), random_batches(2, TOKENS, batch_size=2)
    host, chain = double(make_model, name), chain_over(double(make_model, name))
    constants = measure_constants(chain, [batch])
    keys = QuantSpec(3, constants[2].transform("k", "centered+balanced+hadamard"))
    with torch.no_grad():
        exact = host(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits[:, plan.split :]
    alone = []
    for specs in (
        {0: LayerSpec(QuantSpec(4), QuantSpec(4), window), 2: LayerSpec(keys, QuantSpec(2), window)},
        {2: LayerSpec(keys, QuantSpec(2), window)},
        {3: LayerSpec(QuantSpec(3), QuantSpec(3), window)},
    ):
        log_p, log_q = (x.log_softmax(-1) for x in (exact, served_logits(host, batch, specs, plan)[:, plan.split :]))
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert kl.mean() > 3e-4
        # Gemma's norms are of float32, by which a code at the edge of two may be another: 8e-6 was seen in one token.
        torch.testing.assert_close(Simulator(chain, [batch], plan).measure(specs).kl, kl, rtol=1e-2, atol=1e-5)
        alone.append(kl.mean())
    assert len({round(float(kl), 6) for kl in alone}) == 3


@pytest.mark.parametrize("name", READERS)
def test_a_layer_is_run_anew_behind_one_that_others_read(
    name: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    """What is kept of a configuration's first layers is a hidden state, without the keys that later layers read."""
    chain, plan, batches = chain_of(name), plan_of("decode"), random_batches(3, TOKENS)
    first = {layer: LayerSpec(QuantSpec(3), QuantSpec(2)) for layer in (0, 2)}
    other = {layer: LayerSpec(QuantSpec(4), QuantSpec(8)) for layer in (0, 2, 3)}
    plain, sharing = Simulator(chain, batches, plan), Simulator(chain, batches, plan, reuse=True)
    sharing.prepare()
    # Layers 0 to 3 alike, or 0 and 1, and the readers of layer 2 after others have run.
    for specs, layers_run in (
        (first, 7), ({**first, 3: other[3]}, 5), ({**first, 2: other[2]}, 5), (other, 7), ({**other, 2: first[2]}, 5)
    ):  # fmt: skip
        expected, before = plain.measure(specs), chain.count.layer_tokens
        found = sharing.measure(specs)
        assert (chain.count.layer_tokens - before) // (3 * (TOKENS - SPLIT)) == layers_run
        assert torch.equal(found.kl, expected.kl)


@pytest.mark.parametrize("name", READERS)
def test_a_run_of_some_layers_leaves_the_exact_keys_that_later_ones_read(
    name: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain, (batch,) = chain_of(name), random_batches(2, TOKENS, batch_size=2)
    trace = chain.trace(batch.input_ids, batch.position_ids)
    hook = quantized_attention({0: LayerSpec(QuantSpec(2), QuantSpec(2))}, plan_of("cache"))
    assert not torch.equal(chain.run(trace.residual[0], trace.calls, hook), trace.final)
    for layer_id, hidden in enumerate(trace.residual):
        assert torch.equal(chain.run(hidden, trace.calls, start=layer_id), trace.final)


@pytest.mark.parametrize("name", READERS)
def test_isolated_kl_holds_what_the_readers_of_a_layer_lose(
    name: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches, tmp_path: Path
) -> None:
    """The KL of a whole simulated run is expected, not that of the owner alone."""
    chain, batches, plan = chain_of(name), random_batches(3, TOKENS), plan_of("decode")
    constants, options = measure_constants(chain, batches), QuantizationOptions()
    candidates = [Candidate(layer, side, 2, "none") for layer in (0, 2) for side in ("k", "v")]
    folder = RunFolder(tmp_path)
    folder.create()
    found = measure_isolated(
        chain, batches, candidates, constants, plan=plan, options=options, folder=folder, identity="mine"
    )
    for candidate, kl in found.items():
        expected = Simulator(chain, batches, plan).kl({candidate.layer: spec_of(candidate, constants, options)})
        assert kl == pytest.approx(expected, rel=1e-9)
        assert kl > 0
