"""The candidate pass, recomputed naively: errors in float64, gradients by ordinary autograd through the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from oracles.naive_scores import (
    DRAWS,
    SEED,
    assert_scores_agree,
    exact_call,
    naive_attention,
    naive_scores,
    read_by_spec,
)
from torch import Tensor, nn

from kvtuner.calibration import candidate_pass as measure_module
from kvtuner.calibration import row_sample
from kvtuner.calibration.candidate_pass import CandidateMeasurement
from kvtuner.calibration.forward.read_plan import ReadPlan
from kvtuner.calibration.isolated.forwards import measure_isolated
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.calibration.row_sample import RowSample
from kvtuner.calibration.sensitivity import Candidate, CandidateScores, LayerConstants
from kvtuner.calibration.transform_statistics import measure_constants
from kvtuner.errors import NonFiniteActivationError
from kvtuner.precision import NO_WINDOW, PACKED_BITS, SEARCHED_BITS, ExactWindow, PrecisionPair, ScaleLayout
from kvtuner.quant import QuantSpec
from kvtuner.read_plan_names import READ_PLANS
from kvtuner.run_folder import RunFolder
from kvtuner.transforms import candidate_transforms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fixture_types import RandomBatches
    from transformers import PreTrainedModel

    from kvtuner.calibration.batches import Batch
    from kvtuner.calibration.forward.chain import DecoderChain

TOKENS, SPLIT = 19, 5
DECODE, DEFAULTS = ReadPlan("decode", SPLIT), QuantizationOptions()
WINDOWS = [NO_WINDOW, ExactWindow(4), ExactWindow(1, 3)]
CANDIDATES = [
    ("k", 2, "none"),
    ("k", 4, "balanced+hadamard"),
    ("k", 8, "centered+balanced+hadamard"),
    ("k", 2, "centered+balanced"),
    ("v", 2, "none"),
    ("v", 4, "hadamard"),
]


def plan_of(name: str) -> ReadPlan:
    return ReadPlan(name, 0 if name == "cache" else SPLIT)


def measured(
    chain: DecoderChain,
    batches: Sequence[Batch],
    plan: ReadPlan = DECODE,
    *,
    options: QuantizationOptions = DEFAULTS,
    num_draws: int = DRAWS,
    with_pairs: bool = False,
) -> tuple[CandidateMeasurement, dict[int, LayerConstants]]:
    constants = measure_constants(chain, batches)
    measurement = CandidateMeasurement(chain, constants, plan, options, num_draws, SEED, with_pairs)
    measurement.run(batches)
    return measurement, constants


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", READ_PLANS)
@pytest.mark.parametrize("layer", [0, 1])
def test_errors_and_fisher_scores_are_those_of_a_naive_computation(
    name: str, layer: int, window: ExactWindow, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain, plan, options = chain_of("qwen2-bias"), plan_of(name), QuantizationOptions(window=window)
    pair, single = batches = random_batches(3, TOKENS, batch_size=2)
    measurement, constants = measured(chain, batches, plan, options=options)
    scores = measurement.scores()
    for side, bits, transform in CANDIDATES:
        candidate = Candidate(layer, side, bits, transform)
        of_pair, of_single = (
            naive_scores(chain, batch, candidate, constants, plan, options) for batch in (pair, single)
        )
        mean = {
            field: (2 * getattr(of_pair, field) + getattr(of_single, field)) / 3
            for field in ("e_self", "e_a", "e_o", "fisher")
        }
        assert_scores_agree(scores[candidate], CandidateScores(**mean))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("model", ["gemma3", "gpt-oss", "jamba"])
def test_scores_below_layers_of_other_kinds_are_those_of_a_naive_computation(
    model: str, window: ExactWindow, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    """Gradients come to layer 1 through a window, or a state space, and another full layer; gpt-oss has sinks."""
    chain, options = (
        chain_of(model, sliding_window=8) if model != "jamba" else chain_of(model),
        QuantizationOptions(window=window),
    )
    (batch,) = batches = random_batches(2, TOKENS, batch_size=2)
    measurement, constants = measured(chain, batches, options=options)
    assert {candidate.layer for candidate in measurement.sums} == set(constants) == {1, 3}
    for side, bits, transform in CANDIDATES:
        candidate = Candidate(1, side, bits, transform)
        expected = naive_scores(chain, batch, candidate, constants, DECODE, options)
        assert_scores_agree(measurement.scores()[candidate], expected)


@pytest.mark.parametrize("name", READ_PLANS)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("model", ["deepseek-v2", "deepseek-v3", "glm-moe-dsa"])
def test_scores_of_latents_are_those_of_a_naive_computation(
    model: str, window: ExactWindow, name: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    """Keys and values are made of what is read back, and both count; layer 1 may read what layer 0's index selects."""
    chain, plan, options = chain_of(model), plan_of(name), QuantizationOptions(window=window)
    (batch,) = batches = random_batches(2, TOKENS, batch_size=2)
    measurement, constants = measured(chain, batches, plan, options=options)
    assert {candidate.side for candidate in measurement.sums} == {"k"}
    for side, bits, transform in CANDIDATES[:4]:
        candidate = Candidate(1, side, bits, transform)
        expected = naive_scores(chain, batch, candidate, constants, plan, options)
        assert_scores_agree(measurement.scores()[candidate], expected)


class OtherLinear(nn.Linear):
    """A head that is not known to be a plain matrix."""


@pytest.mark.parametrize(
    ("head", "model", "changes"),
    [
        ("capped", "gemma3", {"final_logit_softcapping": 1.5}),
        ("scaled", "cohere2", {"logit_scale": 0.5}),
        ("divided", "granite-swa", {"logits_scaling": 3.0}),
        ("with a bias", "qwen2-bias", {}),
        ("of another class", "qwen2-bias", {}),
    ],
)
def test_labels_are_of_the_models_own_logits(
    head: str,
    model: str,
    changes: dict[str, float],
    make_model: Callable[..., PreTrainedModel],
    chain_over: Callable[[PreTrainedModel], DecoderChain],
    random_batches: RandomBatches,
) -> None:
    built = make_model(model, **changes)
    rows = built.lm_head.weight
    if head in ("with a bias", "of another class"):
        head_class = OtherLinear if head == "of another class" else nn.Linear
        built.lm_head = head_class(rows.shape[1], rows.shape[0])
        nn.init.normal_(built.lm_head.bias)
        built.lm_head.weight = rows
    chain = chain_over(built)
    assert chain.has_rows_of_tokens == (head != "of another class")
    (batch,) = batches = random_batches(2, TOKENS, batch_size=2)
    measurement, constants = measured(chain, batches)
    for side, bits, transform in CANDIDATES[::2]:
        candidate = Candidate(1, side, bits, transform)
        expected = naive_scores(chain, batch, candidate, constants, DECODE, DEFAULTS)
        assert_scores_agree(measurement.scores()[candidate], expected)


@pytest.mark.parametrize("model", ["head-dim-80", "qwen3-qk-norm", "qwen3-moe"])
def test_group_sizes_and_symmetry_reach_every_candidate(
    model: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain, plan = chain_of(model), DECODE
    half = chain.geometry.head_dim // 2
    options = QuantizationOptions(
        k_layout=ScaleLayout(half), v_layout=ScaleLayout(half), symmetric=True, three_bits=True
    )
    (batch,) = random_batches(1, TOKENS)
    measurement, constants = measured(chain, [batch], plan, options=options)
    for side, bits, transform in [*CANDIDATES, ("k", 3, "centered+balanced"), ("v", 3, "hadamard")]:
        candidate = Candidate(0, side, bits, transform)
        expected = naive_scores(chain, batch, candidate, constants, plan, options)
        assert_scores_agree(measurement.scores()[candidate], expected)


@pytest.mark.parametrize(("three_bits", "widths"), [(False, SEARCHED_BITS), (True, PACKED_BITS)])
def test_every_candidate_of_every_layer_is_measured_once(
    three_bits: bool,
    widths: tuple[int, ...],
    chain_of: Callable[..., DecoderChain],
    random_batches: RandomBatches,
) -> None:
    options = QuantizationOptions(three_bits=three_bits)
    measurement, _ = measured(chain_of("llama-gqa"), random_batches(1, TOKENS), options=options)
    sides = {"k": candidate_transforms("k"), "v": candidate_transforms("v")}
    assert set(measurement.scores()) == {
        Candidate(layer, side, bits, transform)
        for layer in range(3)
        for side, transforms in sides.items()
        for bits in widths
        for transform in transforms
    }
    assert all(score.e_a == 0 for candidate, score in measurement.scores().items() if candidate.side == "v")
    assert all(score.kl is None for score in measurement.scores().values())


def test_scores_fall_with_bits(
    family: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    measurement, _ = measured(chain_of(family), random_batches(2, 32), options=QuantizationOptions(three_bits=True))
    scores = measurement.scores()
    for candidate in scores:
        wider = {2: 4, 3: 8, 4: 8}.get(candidate.bits)
        if wider is None:
            continue
        better = scores[replace(candidate, bits=wider)]
        for name in ("e_self", "e_o", "fisher"):
            assert getattr(better, name) < getattr(scores[candidate], name), (candidate, name)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_pairs_quantize_both_sides_without_transforms(
    window: ExactWindow, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain, plan = chain_of("qwen2-bias"), DECODE
    (batch,) = random_batches(2, TOKENS, batch_size=2)
    measurement, _ = measured(chain, [batch], plan, options=QuantizationOptions(window=window), with_pairs=True)
    pairs = measurement.pairs()
    assert set(pairs) == {
        (layer, PrecisionPair(k, v)) for layer in (0, 1) for k in SEARCHED_BITS for v in SEARCHED_BITS
    }
    call = exact_call(chain, batch, 1)
    _, o = naive_attention(call, call.k, call.v, plan.split)
    for k_bits, v_bits in ((2, 8), (4, 2), (8, 8)):
        k, v = read_by_spec(QuantSpec(k_bits), call.k, plan), read_by_spec(QuantSpec(v_bits), call.v, plan)
        _, read_o = naive_attention(call, k, v, plan.split, window)
        expected = float(((read_o - o).abs() / o.abs()).mean())
        assert pairs[1, PrecisionPair(k_bits, v_bits)] == pytest.approx(expected, rel=2e-4)
    assert measured(chain, [batch], plan)[0].pairs() == {}


@pytest.mark.parametrize("name", READ_PLANS)
def test_a_part_of_the_rows_is_scored_as_the_whole_would_be(
    name: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, plan = chain_of("qwen2-bias"), plan_of(name)
    (batch,) = random_batches(1, TOKENS)
    chosen = torch.tensor([0, 3, 4, 9, 12])
    weights = torch.tensor([1.0, 2.0, 3.0, 1.5, 6.5])

    def some(importance: Tensor, start: int, generator: torch.Generator) -> RowSample:
        return RowSample(start + chosen, weights, len(importance))

    monkeypatch.setattr(measure_module, "sample_rows", some)
    monkeypatch.setattr(measure_module, "MAX_SPAN", 6)  # several blocks
    measurement, constants = measured(chain, [batch], plan)
    scores, shares = measurement.scores(), weights.double() / weights.sum()
    for side, bits, transform in CANDIDATES:
        for layer in (0, 1):
            candidate = Candidate(layer, side, bits, transform)
            rows = [naive_scores(chain, batch, candidate, constants, plan, DEFAULTS, row) for row in chosen.split(1)]
            seen = weights * (plan.split + chosen + 1)
            expected = CandidateScores(
                e_self=rows[0].e_self,
                e_a=sum(float(n) * row.e_a for n, row in zip(seen / seen.sum(), rows, strict=True)),
                e_o=sum(float(n) * row.e_o for n, row in zip(shares, rows, strict=True)),
                fisher=sum(float(n) * row.fisher for n, row in zip(weights, rows, strict=True)) / (TOKENS - plan.split),
            )
            assert_scores_agree(scores[candidate], expected)


@pytest.mark.slow
def test_scores_of_sampled_rows_are_those_of_all_rows_on_average(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, batches = chain_of("llama-gqa"), random_batches(1, 160)
    constants, plan = measure_constants(chain, batches), ReadPlan("decode", 32)
    found: list[dict[Candidate, CandidateScores]] = []
    for min_rows, seeds in ((1000, 1), (16, 40)):
        monkeypatch.setattr(row_sample, "MIN_ROWS", min_rows)
        for seed in range(seeds):
            measurement = CandidateMeasurement(chain, constants, plan, DEFAULTS, 1, SEED)
            monkeypatch.setattr(
                measure_module,
                "sample_rows",
                lambda importance, start, _, seed=seed: row_sample.sample_rows(
                    importance, start, torch.Generator().manual_seed(seed)
                ),
            )
            measurement.run(batches)
            found.append(measurement.scores())
    for candidate, expected in found[0].items():
        fishers = torch.tensor([scores[candidate].fisher for scores in found[1:]], dtype=torch.float64)
        error = float(fishers.std()) / len(fishers) ** 0.5
        assert abs(float(fishers.mean()) - expected.fisher) < 4 * error
        assert 0 < float(fishers.std()) < 0.5 * expected.fisher


@pytest.mark.parametrize("name", READ_PLANS)
def test_rows_scored_a_few_at_a_time_give_the_same_numbers(
    name: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, plan = chain_of("qwen2-bias"), plan_of(name)
    batches = random_batches(2, TOKENS, batch_size=2)
    whole, _ = measured(chain, batches, plan, with_pairs=True)
    per_row = 2 * 4 * TOKENS * len(SEARCHED_BITS)
    calls = []
    original = CandidateMeasurement._score_rows
    monkeypatch.setattr(
        CandidateMeasurement, "_score_rows", lambda self, *args: calls.append(1) or original(self, *args)
    )
    for rows in (1, 4):
        monkeypatch.setattr(measure_module, "SCORES_IN_FLIGHT", per_row * rows)
        calls.clear()
        cut, _ = measured(chain, batches, plan, with_pairs=True)
        assert len(calls) == 2 * -(-(TOKENS - plan.split) // rows)
        for candidate, expected in whole.scores().items():
            assert_scores_agree(cut.scores()[candidate], expected)
        for key, value in whole.pairs().items():
            assert cut.pairs()[key] == pytest.approx(value, rel=1e-4)


def test_errors_are_means_over_sequences_however_they_are_batched(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain = chain_of("qwen2-bias")
    constants = measure_constants(chain, random_batches(5, TOKENS))
    results = []
    for batch_size in (1, 2, 5):
        measurement = CandidateMeasurement(chain, constants, DECODE, DEFAULTS, 1, SEED, True)
        measurement.run(random_batches(5, TOKENS, batch_size=batch_size))
        results.append(measurement)
    for other in results[1:]:
        for candidate, expected in results[0].scores().items():
            found = other.scores()[candidate]
            assert_scores_agree(replace(found, fisher=0.0), replace(expected, fisher=0.0))
        for key, value in results[0].pairs().items():
            assert other.pairs()[key] == pytest.approx(value, rel=1e-4)


def test_the_same_seed_gives_the_same_numbers_and_another_draws_other_labels(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain, batches = chain_of("llama-gqa"), random_batches(1, TOKENS)
    constants = measure_constants(chain, batches)

    def run(seed: int) -> dict[Candidate, CandidateScores]:
        measurement = CandidateMeasurement(chain, constants, DECODE, DEFAULTS, 2, seed)
        measurement.run(batches)
        return measurement.scores()

    first, again, other = run(0), run(0), run(1)
    assert first == again
    for candidate, scores in first.items():
        assert scores.fisher != other[candidate].fisher
        assert replace(scores, fisher=0.0) == replace(other[candidate], fisher=0.0)


def test_progress_is_told_in_tokens_of_each_layer(
    chain_of: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain, progress = chain_of("llama-gqa"), []
    batches = random_batches(3, TOKENS, batch_size=2)
    constants = measure_constants(chain, batches)
    measurement = CandidateMeasurement(chain, constants, DECODE, DEFAULTS, 1, SEED)
    measurement.run(batches, on_layer=progress.append)
    assert progress == [2 * TOKENS] * 3 + [TOKENS] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa", "head-dim-80"])
def test_the_fisher_score_is_the_isolated_kl_where_errors_are_small(
    name: str, chain_of: Callable[..., DecoderChain], random_batches: RandomBatches, tmp_path: Path
) -> None:
    chain, plan = chain_of(name), ReadPlan.of("decode", 64)
    batches = random_batches(4, 64)
    measurement, constants = measured(chain, batches, plan, num_draws=32)
    fisher = {candidate: score.fisher for candidate, score in measurement.scores().items() if candidate.bits == 8}
    kl = measure_isolated(
        chain,
        batches,
        list(fisher),
        constants,
        plan=plan,
        options=DEFAULTS,
        folder=RunFolder(tmp_path),
        identity="physics",
    )
    ratios = torch.tensor([fisher[candidate] / kl[candidate] for candidate in fisher])
    # 192 scored tokens times 32 draws leave a few percent of noise; the cross terms of positions are not in the score.
    assert 0.93 < float(ratios.mean()) < 1.07
    assert float(ratios.min()) > 0.8
    assert float(ratios.max()) < 1.25


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_last_layer_that_turns_non_finite_is_named(
    value: float, make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain, batches = chain_over(make_model("llama-gqa")), random_batches(1, TOKENS)
    constants = measure_constants(chain, batches)
    with torch.no_grad():
        chain.model.model.layers[2].mlp.down_proj.weight[0, 0] = value
    measurement = CandidateMeasurement(chain, constants, DECODE, DEFAULTS, 1, SEED)
    with pytest.raises(NonFiniteActivationError, match="layer 2: its outputs hold NaN or infinity"):
        measurement.run(batches)


def test_gradients_that_overflow_are_an_error_that_names_the_layer(
    make_model: Callable[..., Any], chain_over: Callable[..., DecoderChain], random_batches: RandomBatches
) -> None:
    chain, batches = chain_over(make_model("llama-gqa")), random_batches(1, TOKENS)
    constants = measure_constants(chain, batches)
    chain.layers[1].register_full_backward_hook(lambda module, by_input, by_output: (by_input[0] * torch.nan,))
    measurement = CandidateMeasurement(chain, constants, DECODE, DEFAULTS, 1, SEED)
    with pytest.raises(NonFiniteActivationError, match="layer 0: its gradients hold NaN or infinity"):
        measurement.run(batches)
