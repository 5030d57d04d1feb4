"""Transform constants, against float64 numpy over captured keys and queries."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvtuner.calibration.forward.read_plan import AttentionCall, attend
from kvtuner.calibration.transform_statistics import balance, measure_constants
from kvtuner.errors import NonFiniteActivationError
from kvtuner.transforms import MAX_LAMBDA, MIN_LAMBDA

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixture_types import RandomBatches

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.forward.chain import DecoderChain

FP16_STEP = 2**-10


def captured(chain: DecoderChain, batches: list[Batch]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Keys [tokens, KV heads, channels] and queries [tokens, KV heads, group, channels] by layer, float64."""
    kept: dict[int, list[AttentionCall]] = {}

    def hook(layer_id: int, call: AttentionCall) -> Tensor:
        kept.setdefault(layer_id, []).append(call)
        return attend(call)

    for batch in batches:
        chain.trace(batch.input_ids, batch.position_ids, hook)

    def tokens_first(x: Tensor) -> np.ndarray:
        return x.transpose(1, 2).flatten(0, 1).double().numpy()

    found = {}
    for layer_id, calls in kept.items():
        keys = np.concatenate([tokens_first(call.k) for call in calls])
        queries = np.concatenate([tokens_first(call.q) for call in calls])
        found[layer_id] = keys, queries.reshape(len(keys), keys.shape[1], -1, keys.shape[2])
    return found


def lambda_by_hand(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    ratio = np.sqrt(np.sqrt((keys**2).mean(axis=0)) / np.sqrt((queries**2).mean(axis=(0, 2))))
    return ratio / np.exp(np.log(ratio).mean(axis=-1, keepdims=True))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_constants_are_those_of_the_keys_and_queries_seen(
    family: str, batch_size: int, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_of(family)
    batches = random_batches(3, 29, batch_size=batch_size)
    constants = measure_constants(chain, batches)
    seen = captured(chain, batches)
    assert len(constants) == len(seen) == chain.geometry.num_layers
    for layer_id, (keys, queries) in seen.items():
        layer = constants[layer_id]
        assert layer.mu.dtype == layer.lam.dtype == layer.lam_centered.dtype == torch.float16
        np.testing.assert_allclose(layer.mu.double(), keys.mean(axis=0), rtol=FP16_STEP, atol=1e-6)
        np.testing.assert_allclose(layer.lam.double(), lambda_by_hand(keys, queries), rtol=FP16_STEP)
        centered = lambda_by_hand(keys - layer.mu.double().numpy(), queries)
        np.testing.assert_allclose(layer.lam_centered.double(), centered, rtol=FP16_STEP)


def test_constants_do_not_depend_on_how_sequences_are_batched(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_of("qwen2-bias")
    one, three = (measure_constants(chain, random_batches(5, 16, batch_size=size)) for size in (1, 3))
    for first, second in zip(one.values(), three.values(), strict=True):
        for name in ("mu", "lam", "lam_centered"):
            torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=FP16_STEP, atol=1e-6)


def test_dead_channels_have_lambda_1_and_leave_the_others_geometric_mean_at_1(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    model = make_model("llama-gqa")
    with torch.no_grad():  # one rotary pair of KV head 0, and of the queries of KV head 1
        model.model.layers[0].self_attn.k_proj.weight[[3, 11]] = 0
        model.model.layers[0].self_attn.q_proj.weight[[2 * 16 + 5, 2 * 16 + 13, 3 * 16 + 5, 3 * 16 + 13]] = 0
    layer = measure_constants(chain_over(model), random_batches(2, 24))[0]
    for lam in (layer.lam, layer.lam_centered):
        assert lam[0, [3, 11]].tolist() == [1.0, 1.0]
        assert lam[1, [5, 13]].tolist() == [1.0, 1.0]
        assert (lam == 1.0).sum() < 10
        torch.testing.assert_close(lam.double().log().mean(-1), torch.zeros(2).double(), rtol=0, atol=1e-3)
    assert layer.mu[0, [3, 11]].tolist() == [0.0, 0.0]


def test_balance_follows_the_square_root_of_the_ratio() -> None:
    lam = balance(torch.tensor([[4.0, 1.0]]), torch.tensor([[1.0, 4.0]]))
    assert lam.tolist() == [[2.0, 0.5]]


def test_balance_is_the_same_whatever_the_scale_of_keys_and_queries() -> None:
    generator = torch.Generator().manual_seed(0)
    key, query = torch.rand(2, 3, 32, generator=generator, dtype=torch.float64) + 0.1
    reference = balance(key, query)
    torch.testing.assert_close(reference.double().log().mean(-1), torch.zeros(3).double(), rtol=0, atol=FP16_STEP)
    assert torch.equal(balance(key * 1e6, query), reference)
    assert torch.equal(balance(key, query * 1e-6), reference)


def test_balance_stays_within_its_bounds() -> None:
    key = torch.tensor([[1e12, 1.0, 1.0, 1e-12]], dtype=torch.float64)
    lam = balance(key, torch.ones_like(key))
    assert lam.tolist() == [[MAX_LAMBDA, 1.0, 1.0, MIN_LAMBDA]]


@pytest.mark.parametrize(("key", "query"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_head_without_live_channels_has_lambda_1_everywhere(key: float, query: float) -> None:
    assert balance(torch.full((2, 4), key), torch.full((2, 4), query)).tolist() == [[1.0] * 4] * 2


def test_a_mean_beyond_fp16_is_clamped_and_not_infinite(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    model = make_model("qwen2-bias")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias.fill_(1e7)
    layer = measure_constants(chain_over(model), random_batches(1, 16))[0]
    for constant in (layer.mu, layer.lam, layer.lam_centered):
        assert constant.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("side", "name"), [("q", "queries"), ("k", "keys"), ("v", "values")])
def test_a_layer_that_turns_non_finite_is_named(
    side: str,
    name: str,
    value: float,
    make_model: Callable[..., Any],
    chain_over: Callable[..., DecoderChain],
    random_batches: RandomBatches,
) -> None:
    chain = chain_over(make_model("llama-gqa"))
    with torch.no_grad():
        getattr(chain.model.model.layers[1].self_attn, f"{side}_proj").weight[0, 0] = value
    with pytest.raises(NonFiniteActivationError, match=f"layer 1: its {name} hold NaN or infinity"):
        measure_constants(chain, random_batches(1, 16))


def test_a_layer_that_gives_the_next_one_nan_is_named_itself(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_over(make_model("llama-gqa"))
    with torch.no_grad():
        chain.model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteActivationError, match="layer 0: its outputs hold NaN or infinity"):
        measure_constants(chain, random_batches(1, 16))


@pytest.mark.slow
def test_memory_grows_with_depth_by_the_residual_stream_alone(
    chain_of: Callable[..., DecoderChain],
    random_batches: RandomBatches,
    peak_bytes: Callable[[Callable[[], object]], int],
) -> None:
    tokens, peaks = 128, {}
    for depth in (2, 8):
        for num_sequences in (2, 6):
            chain = chain_of("llama-gqa", num_hidden_layers=depth)
            batches = random_batches(num_sequences, tokens, batch_size=2)
            peaks[depth, num_sequences] = peak_bytes(partial(measure_constants, chain, batches))
    residual = 2 * tokens * 64 * 4
    assert peaks[2, 6] <= 1.01 * peaks[2, 2]
    assert peaks[8, 6] <= 1.01 * peaks[8, 2]
    assert peaks[8, 2] - peaks[2, 2] <= 6 * 1.05 * residual


def test_the_memory_meter_counts_what_is_alive_at_once(peak_bytes: Callable[[Callable[[], object]], int]) -> None:
    def views_and_freed_tensors() -> None:
        first = torch.ones(1000)
        second = first + 1
        view = second[:10]
        del first, second, view
        torch.ones(500)

    def saved_for_backward() -> None:
        leaf = torch.ones(1000, requires_grad=True)
        with torch.enable_grad():
            leaf.exp().exp().sum().backward()

    assert peak_bytes(views_and_freed_tensors) == 2 * 4000
    assert 3 * 4000 <= peak_bytes(saved_for_backward) < 6 * 4000
