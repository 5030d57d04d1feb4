"""Budgets against sums done by hand, from the bytes of `row_bytes` alone."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from kvtuner.errors import BudgetError, GeometryError
from kvtuner.geometry import ModelGeometry
from kvtuner.layer_geometry import CacheGeometry, LayerGeometry, LayerKind
from kvtuner.precision import ALL_BITS, ExactWindow, PrecisionPair, effective_bits, mean_bits, row_bytes
from kvtuner.search_spaces.budget import Budget

GEOMETRY = ModelGeometry(num_layers=7, num_attention_heads=8, num_kv_heads=4, head_dim=64, v_head_dim=32)
PAIRS = [PrecisionPair(k, v) for k, v in product(ALL_BITS, ALL_BITS)]
UNITS = ["bit", "bpe", "%", "KiB/token", "GiB@32x64k", "TB@9x1"]


def stored(pair: PrecisionPair, heads: int) -> int:
    return row_bytes(heads, 64, pair.k_bits) + row_bytes(heads, 32, pair.v_bits)


@pytest.mark.parametrize(
    ("text", "canonical", "name"),
    [
        ("4bit", "4bit", "4bit"),
        (" 3.250 Bits ", "3.25bit", "3.25bit"),
        ("4.25BPE", "4.25bpe", "4.25bpe"),
        ("35%", "35%", "35pct"),
        ("18kib/token", "18KiB/token", "18KiB-per-token"),
        ("1500 B/token", "1500B/token", "1500B-per-token"),
        ("40gib@32x64K", "40GiB@32x64k", "40GiB-32x64k"),
        ("80GB@1x1000", "80GB@1x1000", "80GB-1x1000"),
    ],
)
def test_budgets_have_one_text_and_a_name_for_files(text: str, canonical: str, name: str) -> None:
    budget = Budget.parse(text)
    assert (budget.text, budget.name) == (canonical, name)
    assert Budget.parse(budget.text) == budget
    assert (budget.num_requests is None) == (budget.request_tokens is None) == ("@" not in text)
    assert not set(name) & set("/\\%@ ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "four bit",
        "-4bit",
        "4e1bit",
        "nanbit",
        "0bit",
        "0%",
        "18KiB",
        "40GiB",
        "40GiB@32",
        "40GiB@0x64k",
        "40GiB@32x0",
        "18PiB/token",
        "4bit4bit",
        "4.bit",
        ".5bit",
        "٤bit",
        "4bit\n5bit",
        "1" * 13 + "bit",
    ],
)
def test_text_that_is_no_budget_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(BudgetError, match="40GiB@32x64k"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("text", "cap"),
    [
        ("3.3bit", int(Fraction("3.3") * 7 * (64 + 32))),
        ("3.3bpe", int(Fraction("3.3") * 7 * 4 * (64 + 32) / 8)),
        ("35%", 7 * 4 * (64 + 32) * 2 * 35 // 100),
        ("2.5KiB/token", 2560),
        ("2.5kB/token", 2500),
        ("1GiB@32x16k", 2**30 // (32 * 16 * 1024)),
        ("1GB@3x1000", 10**9 // 3000),
    ],
)
def test_cap_is_the_budget_in_whole_units_of_cost(text: str, cap: int) -> None:
    assert Budget.parse(text).constraint(GEOMETRY).cap(0) == cap


def test_memory_for_requests_of_a_known_length_holds_the_copies_of_their_window() -> None:
    window, native = ExactWindow(32, 4), 4 * (64 + 32) * 2
    memory = Budget.parse("1GiB@32x16k")
    with_copies = memory.constraint(GEOMETRY, window=window)
    assert with_copies.cap(0) == (2**30 - 32 * 36 * 7 * (native + 4)) // (32 * 16 * 1024)
    assert with_copies.cap(0) < memory.constraint(GEOMETRY).cap(0)
    smallest = Budget.parse(with_copies.smallest()).constraint(GEOMETRY, window=window)
    assert smallest.is_met([PrecisionPair(2, 2)] * 7)
    for text in ("4bit", "4.5bpe", "35%", "2.5KiB/token"):
        assert Budget.parse(text).constraint(GEOMETRY, window=window).cap(0) == Budget.parse(text).constraint(
            GEOMETRY
        ).cap(0)


def test_a_layer_that_needs_no_copies_costs_at_least_nothing_in_requests_shorter_than_their_window() -> None:
    native = PrecisionPair(16, 16)
    for context, cost in ((144, 576), (72, 384), (36, 0), (18, 0)):  # of 768 bytes the window's 36 tokens are taken off
        constraint = Budget.parse(f"1GiB@32x{context}").constraint(GEOMETRY, window=ExactWindow(32, 4))
        assert constraint.cost(native) == cost
        assert constraint.cost(PrecisionPair(16, 8)) == stored(PrecisionPair(16, 8), 4), "keys and values have copies"


def test_memory_for_requests_of_a_known_length_holds_the_keys_of_indexes_too() -> None:
    with_index = LayerGeometry(LayerKind("latent"), 16, 1, 512, 0, 64, 128)
    cache = CacheGeometry((with_index, replace(with_index, index_dim=0), with_index))
    memory = Budget.parse("1GiB@32x16k")
    counted = memory.constraint(cache.tuned(), others=cache)
    assert counted.cap(0) == 2**30 // (32 * 16 * 1024) - 2 * (128 + 4)
    for text in ("5bit", "6bpe", "50%", "2.5KiB/token"):
        budget = Budget.parse(text)
        assert budget.constraint(cache.tuned(), others=cache).cap(0) == budget.constraint(cache.tuned()).cap(0)


def test_mean_bits_count_payload_and_all_others_stored_bytes() -> None:
    bits = Budget.parse("4bit").constraint(GEOMETRY)
    stored_bytes = Budget.parse("4.5bpe").constraint(GEOMETRY)
    for pair in PAIRS:
        assert bits.cost(pair) == 64 * pair.k_bits + 32 * pair.v_bits
        assert stored_bytes.cost(pair) == stored(pair, 4)


@pytest.mark.parametrize("pair", [PrecisionPair(4, 4), PrecisionPair(8, 2), PrecisionPair(2, 8)], ids=str)
def test_a_uniform_pair_meets_exactly_the_budget_of_its_own_bits(pair: PrecisionPair) -> None:
    pairs, shape = [pair] * 7, GEOMETRY.row_shape()
    for measure, unit in ((mean_bits, "bit"), (effective_bits, "bpe")):
        exact = measure(pairs, shape)
        above, below = (
            Budget.parse(f"{float(exact + step):.6f}{unit}") for step in (Fraction(1, 10**5), -Fraction(1, 10**5))
        )
        assert above.constraint(GEOMETRY).is_met(pairs)
        assert not below.constraint(GEOMETRY).is_met(pairs)


def test_tensor_parallel_ranks_pay_for_padding() -> None:
    whole = Budget.parse("50%").constraint(GEOMETRY)
    rank = Budget.parse("50%").constraint(GEOMETRY, tp_size=4)
    pair = PrecisionPair(2, 2)
    # One head of 64 keys: 16 bytes of codes and 4 of scale are padded to 32; 32 values: 8 + 4 to 16.
    assert rank.cost(pair) == 32 + 16
    assert 4 * rank.cost(pair) > whole.cost(pair) == 4 * (16 + 4) + 4 * (8 + 4)
    assert rank.cap(0) * 4 == whole.cap(0)


def test_more_ranks_than_heads_replicate_them() -> None:
    assert Budget.parse("1KiB/token").constraint(GEOMETRY, tp_size=8).cost(PrecisionPair(4, 4)) == 48 + 32


def test_every_stage_has_its_own_cap() -> None:
    constraint = Budget.parse("4bit").constraint(GEOMETRY, pp_size=3)
    assert [list(stage) for stage in constraint.stages] == [[0, 1], [2, 3], [4, 5, 6]]
    low, mid, high = PrecisionPair(2, 2), PrecisionPair(4, 4), PrecisionPair(8, 8)
    assert constraint.is_met([mid] * 7)
    assert constraint.is_met([low, low, mid, mid, low, high, low])
    # 22 of 28 bits over all layers, but 10 of 8 in the second stage.
    lopsided = [low, low, low, high, low, low, mid]
    assert sum(pair.k_bits for pair in lopsided) < 28
    assert not constraint.is_met(lopsided)
    assert constraint.violation(lopsided) == pytest.approx(10 / 8 - 1)
    assert constraint.violation([mid] * 7) == 0


def test_bytes_per_token_are_those_of_one_gpu_in_every_stage() -> None:
    budget = Budget.parse("1KiB/token")
    assert [budget.constraint(GEOMETRY, pp_size=2).cap(stage) for stage in (0, 1)] == [1024, 1024]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("ranks", [{}, {"tp_size": 2}, {"pp_size": 3}, {"tp_size": 8, "pp_size": 2}], ids=str)
def test_a_budget_below_the_smallest_configuration_says_which_is_the_smallest(unit: str, ranks: dict[str, int]) -> None:
    with pytest.raises(BudgetError, match=r"smallest possible is \S+") as caught:
        Budget.parse(f"0.0000000001{unit}").constraint(GEOMETRY, **ranks)
    smallest = str(caught.value).split()[-1]
    constraint = Budget.parse(smallest).constraint(GEOMETRY, **ranks)
    assert constraint.is_met([PrecisionPair(2, 2)] * 7)
    amount = Budget.parse(smallest).amount
    with pytest.raises(BudgetError):
        Budget.parse(f"{float(amount * Fraction(98, 100)):.15f}{unit}").constraint(GEOMETRY, **ranks)


def test_smallest_of_given_pairs_holds_them() -> None:
    pairs = [PrecisionPair(16, 16), *[PrecisionPair(2, 4)] * 6]
    for unit in UNITS:
        constraint = Budget.parse(f"100{unit}").constraint(GEOMETRY, pp_size=2)
        assert Budget.parse(constraint.smallest(pairs)).constraint(GEOMETRY, pp_size=2).is_met(pairs)


def test_violation_is_positive_exactly_where_the_budget_is_broken() -> None:
    constraint = Budget.parse("41%").constraint(GEOMETRY, tp_size=2, pp_size=2)
    both = set()
    for left, right in product(PAIRS, PAIRS):
        pairs = [left] * 3 + [right] * 4
        caps = [int(Fraction(41, 100) * n * 2 * (64 + 32) * 2) for n in (3, 4)]
        is_met = stored(left, 2) * 3 <= caps[0] and stored(right, 2) * 4 <= caps[1]
        assert constraint.is_met(pairs) == is_met == (constraint.violation(pairs) <= 0)
        both.add(is_met)
    assert both == {True, False}


def test_ranks_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(GeometryError):
        Budget.parse("4bit").constraint(GEOMETRY, pp_size=8)


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize(
    "text", ["2bit", "2.5bit", "3bit", "4.3bit", "8bit", "15bit", "4bpe", "30%", "600B/token", "30MiB@9x4k"]
)
def test_the_most_bytes_hold_every_configuration_inside_the_budget(text: str, tp_size: int, pp_size: int) -> None:
    geometry = ModelGeometry(num_layers=3, num_attention_heads=8, num_kv_heads=4, head_dim=64, v_head_dim=32)
    window = ExactWindow(16)
    constraint = Budget.parse(text).constraint(geometry, tp_size=tp_size, pp_size=pp_size, window=window)
    pairs = [PrecisionPair(k, v) for k, v in product((2, 4, 16), (2, 3, 16))]
    inside = [mix for mix in product(pairs, repeat=3) if constraint.is_met(mix)]
    native = constraint.shape.pair_bytes(PrecisionPair(16, 16))
    for stage, layers in enumerate(constraint.stages):
        taken = [sum(constraint.shape.pair_bytes(mix[layer]) for layer in layers) for mix in inside]
        most = constraint.most_bytes(stage, (2, 3, 4, 8))
        copies = sum(constraint.uncopied(PrecisionPair(16, 16)) for _ in layers)
        assert max(taken) - copies <= most <= len(layers) * native


@pytest.mark.parametrize(("text", "pair"), [("2bit", "K2V2"), ("4bit", "K4V4"), ("8bit", "K8V8"), ("16bit", "K16V16")])
def test_the_most_bytes_of_payload_bits_are_those_of_the_uniform_that_has_them(text: str, pair: str) -> None:
    geometry = ModelGeometry(num_layers=3, num_attention_heads=8, num_kv_heads=4, head_dim=64, v_head_dim=64)
    constraint = Budget.parse(text).constraint(geometry)
    uniform = constraint.shape.pair_bytes(PrecisionPair.parse(pair))
    assert constraint.most_bytes(0, (2, 3, 4, 8)) == 3 * uniform
