"""Exact tokens, against caches that are filled token by token; and stored bits, counted by hand."""

from __future__ import annotations

import pytest
import torch

from benchmarks.recipes.floats import Fp8, Nvfp4
from benchmarks.recipes.kivi import ChannelGroups, TokenGroups, kivi
from benchmarks.recipes.kvarn import EvenTiles, kvarn
from benchmarks.recipes.oscar import SpectralRotation
from benchmarks.recipes.recipe import ExactTokens, StoredSide
from benchmarks.recipes.rotated import ClippedRotation, PlainRotation
from benchmarks.recipes.turboquant import RandomRotation, WithSigns

TOKENS = 23


def exact_by_query(exact: ExactTokens, tokens: int = TOKENS) -> list[set[int]]:
    places = torch.arange(tokens)
    mask = exact.mask(places, places)
    return [set(mask[row, : row + 1].nonzero().flatten().tolist()) for row in range(tokens)]


def kivi_cache(tokens: int, residual: int) -> list[tuple[set[int], set[int]]]:
    """The exact keys and values that each query reads, as `models/llama_kivi.py` keeps them."""
    keys: list[int] = []
    values: list[int] = []
    reads = []
    for token in range(tokens):
        keys.append(token)
        values.append(token)
        reads.append((set(keys), set(values)))
        if len(keys) == residual:  # a whole residual is quantized at once
            keys = []
        if len(values) > residual:  # one token leaves
            values = values[1:]
    return reads


def test_kivis_keys_wait_for_a_full_residual_and_its_values_leave_one_by_one() -> None:
    keys, values = ExactTokens(tile=4, after_reading=True), ExactTokens(recent=5, after_reading=True)
    oracle = kivi_cache(TOKENS, residual=4)
    assert exact_by_query(keys) == [found for found, _ in oracle]
    assert exact_by_query(values) == [found for _, found in oracle]
    # A residual of 128 in groups of 32 is what the recipe has.
    (k, v), *_ = kivi(2, 1).layers
    assert (k.exact.tile, v.exact.recent - 1) == (128, 128)


def test_a_mask_that_quantizes_a_residual_before_its_query_reads_it_is_found() -> None:
    early = ExactTokens(tile=4)
    oracle = [found for found, _ in kivi_cache(TOKENS, residual=4)]
    assert [row for row in range(TOKENS) if exact_by_query(early)[row] != oracle[row]] == [3, 7, 11, 15, 19]


def test_sinks_and_recent_tokens_are_exact_and_all_between_are_not() -> None:
    for row, found in enumerate(exact_by_query(ExactTokens(sinks=2, recent=3))):
        assert found == {token for token in range(row + 1) if token < 2 or token > row - 3}


def test_a_tile_is_quantized_once_it_is_full_and_the_first_never() -> None:
    for row, found in enumerate(exact_by_query(ExactTokens(sinks=4, tile=4))):
        committed = (row + 1) // 4 * 4
        assert found == {token for token in range(row + 1) if token < 4 or token >= committed}


@pytest.mark.parametrize(
    ("exact", "held"),
    [
        (ExactTokens(), 0),
        (ExactTokens(sinks=64, recent=256), 320),
        (ExactTokens(tile=128, after_reading=True), 63.5),
        (ExactTokens(recent=129, after_reading=True), 128),
        (ExactTokens(sinks=128, tile=128), 191.5),
    ],
)
def test_exact_tokens_are_counted_as_what_a_cache_holds_between_two_steps(exact: ExactTokens, held: float) -> None:
    assert exact.held(4000) == held
    assert exact.held(50) == min(50, held)


@pytest.mark.parametrize(
    ("bits", "by_hand"),
    [
        (ChannelGroups(2).bits(64), 2 + (16 + 16) / 32),
        (TokenGroups(2).bits(64), 2 + (16 + 16) / 32),
        (ClippedRotation(2).bits(128), 2 + (16 + 16) / 128),
        (ClippedRotation(2).bits(256), 2 + (16 + 16) / 128),
        (PlainRotation().bits(64), 4 + (16 + 16) / 64),
        (SpectralRotation(torch.eye(64), 0.96).bits(128), 2.25),
        (RandomRotation(3).bits(64), 3 + 16 / 64),
        (WithSigns(3).bits(64), 2 + 1 + (16 + 16) / 64),
        # One (tile, head) of 128 x 128: 8192 bytes of key codes at 4 bits, and 768 of scales.
        (EvenTiles(4, True).bits(128), (8192 + 768) * 8 / 128 / 128),
        (EvenTiles(2, False).bits(128), (4096 + 768) * 8 / 128 / 128),
        # Of 64 channels keys have 2 * 64 + 128 numbers in half precision, values 2 * 128 + 64.
        (EvenTiles(4, True).bits(64), 4 + 16 * 256 / (64 * 128)),
        (EvenTiles(2, False).bits(64), 2 + 16 * 320 / (64 * 128)),
        (Fp8().bits(64), 8),
        (Nvfp4(1.0).bits(64), 4 + 8 / 16),
    ],
)
def test_the_bits_of_an_element_are_those_counted_by_hand(bits: float, by_hand: float) -> None:
    assert bits == by_hand


def test_exact_tokens_take_sixteen_bits_in_place_of_their_codes() -> None:
    side = StoredSide(TokenGroups(2), ExactTokens(sinks=64, recent=256))
    assert side.stored_bits(64, 4000) == pytest.approx((320 * 16 + 3680 * 3) / 4000, rel=1e-12)
    # Keys of KVarN at 4 bits, values at 2, where values have half as many channels.
    found = kvarn(3, sinks=0).stored_bits(128, 64, 1280)
    keys = (63.5 * 16 + 1216.5 * EvenTiles(4, True).bits(128)) / 1280
    values = (63.5 * 16 + 1216.5 * EvenTiles(2, False).bits(64)) / 1280
    assert found == pytest.approx((128 * keys + 64 * values) / 192, rel=1e-12)
