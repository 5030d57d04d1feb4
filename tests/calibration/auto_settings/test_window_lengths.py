"""Lengths of the exact window are compared by the KL of the whole model where rows give up what copies take."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvtuner.calibration.auto_settings import window_lengths
from kvtuner.calibration.auto_settings.window_lengths import JOURNAL, LengthComparison, compare_lengths, lengths_for
from kvtuner.calibration.corpus import CorpusSource, load_corpus
from kvtuner.calibration.forward.simulator import LayerSpec
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.calibration.transform_statistics import measure_constants
from kvtuner.calibration.workbench import IDENTITY_FILE, CalibrationOptions, Workbench
from kvtuner.errors import RunFolderError
from kvtuner.precision import ExactWindow, ScaleLayout
from kvtuner.quant import QuantSpec, Transform
from kvtuner.run_folder import RunFolder
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import LoadTiny

FITTED = QuantizationOptions(fit="least_squares", window=ExactWindow(0, 2), three_bits=True)
SEQUENCE_LENGTH = 136
HEAD_DIM = 32


@pytest.fixture
def bench_of(load_tiny: LoadTiny, corpus_file: Path) -> Callable[..., Workbench]:
    """`bench_of(quant=..., context_length=None)`: a workbench of a tiny model, its counter at 0."""

    def make(quant: QuantizationOptions = FITTED, context_length: int | None = None) -> Workbench:
        loaded = load_tiny("qwen2-bias", head_dim=HEAD_DIM)
        if context_length is not None:
            loaded = replace(loaded, shape=replace(loaded.shape, context_length=context_length))
        source = CorpusSource(str(corpus_file), sequence_length=SEQUENCE_LENGTH, num_sequences=(2, 1, 1))
        bench = Workbench.prepare(loaded, load_corpus(source, loaded.tokenizer), CalibrationOptions(quant=quant))
        bench.chain.count.layer_tokens = 0
        return bench

    return make


def comparison(kl: dict[int, tuple[float, float]], context_length: int = 1024, sinks: int = 0) -> LengthComparison:
    return LengthComparison(context_length, sinks, kl, (2, 3))


def test_lengths_reach_an_eighth_of_a_sequence() -> None:
    assert lengths_for(64) == (0,)
    assert lengths_for(128) == lengths_for(255) == (0, 16)
    assert lengths_for(2048) == lengths_for(32768) == window_lengths.COMPARED_LENGTHS


def test_rows_give_up_the_bits_of_the_copies() -> None:
    # 16 of 1024 tokens in 16 bits take a quarter of a bit of every element; a bit is worth a factor of 4 here.
    found = comparison({0: (0.4, 0.1), 16: (0.4, 0.1), 64: (0.04, 0.01)})
    assert found.kl_at_equal_bytes(0) == pytest.approx(0.1)
    assert found.kl_at_equal_bytes(16) == pytest.approx(0.1 * 4**0.25)
    assert found.kl_at_equal_bytes(64) == pytest.approx(0.04)  # a whole bit: rows of 2 bits are left
    assert found.chosen == 64
    assert replace(found, sinks=8).kl_at_equal_bytes(16) == pytest.approx(0.1 * 4**0.375)
    assert replace(found, widths=(2, 4)).kl_at_equal_bytes(16) == pytest.approx(0.1 * 2 * 2**0.25)


def test_a_window_that_its_copies_outweigh_is_not_chosen() -> None:
    kl = {0: (0.4, 0.1), 16: (0.32, 0.08), 64: (0.2, 0.05)}
    assert comparison(kl, context_length=512).chosen == 0  # half a bit costs a factor of 2
    assert comparison(kl, context_length=4096).chosen == 64
    assert comparison(kl, context_length=2048).chosen == 16  # .0951, where 64 tokens have .1
    assert comparison({0: (0.4, 0.1), 16: (0.4, 0.1)}, context_length=10**9).chosen == 0
    # Copies of 256 of 1024 tokens take more than the rows have.
    assert comparison({0: (0.4, 0.1), 256: (1e-9, 1e-9)}).chosen == 0
    assert comparison({0: (0.4, 0.1), 16: (1e-9, math.inf)}).chosen == 0
    assert comparison({0: (math.inf, math.inf), 16: (math.inf, math.inf)}).chosen == 0


def test_equal_lengths_are_decided_for_the_shortest() -> None:
    assert comparison({32: (1e-12, 1e-12), 16: (1e-12, 1e-12)}).chosen == 16


@pytest.mark.parametrize(("three_bits", "wide"), [(True, 3), (False, 4)])
def test_each_kl_is_of_the_whole_model_with_keys_and_values_at_one_width(
    bench_of: Callable[..., Workbench], tmp_path: Path, three_bits: bool, wide: int
) -> None:
    bench = bench_of(replace(FITTED, three_bits=three_bits, k_layout=ScaleLayout(16, 16)))
    found = compare_lengths(bench, RunFolder(tmp_path))
    assert (list(found.kl), found.widths, found.sinks) == ([0, 16], (2, wide), 2)
    assert found.context_length == bench.loaded.shape.context_length
    constants = measure_constants(bench.chain, bench.batches("calibrate"))
    simulator = bench.simulator("calibrate")
    for length, kls in found.kl.items():
        for bits, kl in zip(found.widths, kls, strict=True):
            specs = {}
            for layer, constant in constants.items():
                kind = TransformKind.parse("centered+balanced+hadamard")
                key_transform = Transform(kind, constant.mu, constant.lam_centered)
                keys = QuantSpec(bits, key_transform, 16, False, "least_squares", word_bits=16)
                values = QuantSpec(bits, Transform(TransformKind.parse("hadamard")), None, False, "least_squares")
                specs[layer] = LayerSpec(keys, values, ExactWindow(length, 2))
            by_sequence = simulator.measure(specs).kl.mean(dim=1)
            assert kl == pytest.approx(float(by_sequence.log().mean().exp()), rel=1e-9)
    assert found.kl[16][0] < found.kl[0][0]


def test_what_a_folder_holds_is_not_measured_again_and_gives_the_same(
    bench_of: Callable[..., Workbench], tmp_path: Path
) -> None:
    folder, bench = RunFolder(tmp_path), bench_of()
    first = compare_lengths(bench, folder)
    assert bench.chain.count.layer_tokens > 0
    # The length of the workbench is what is to be decided: it does not matter.
    again = bench_of(replace(FITTED, window=ExactWindow(32, 2)))
    assert compare_lengths(again, folder) == first
    assert again.chain.count.layer_tokens == 0
    lines = (tmp_path / JOURNAL).read_text().splitlines(keepends=True)
    assert len(lines) == 4 * 2  # lengths and widths, sequences
    (tmp_path / JOURNAL).write_text("".join(lines[:2]) + lines[2][:30])
    assert compare_lengths(bench_of(), folder) == first
    other = bench_of(replace(FITTED, window=ExactWindow(0, 4)))
    assert compare_lengths(other, folder) != first and other.chain.count.layer_tokens > 0


def test_the_folder_of_another_run_is_refused_before_anything_is_measured(
    bench_of: Callable[..., Workbench], tmp_path: Path
) -> None:
    folder, bench = RunFolder(tmp_path), bench_of()
    chosen = replace(FITTED, window=ExactWindow(16, 2), v_layout=ScaleLayout(16, 16))
    folder.check_identity(IDENTITY_FILE, bench.with_quant(chosen).identity(), "measurements")
    compare_lengths(bench, folder, undecided=("v_group_size", "v_word_bits"))
    with pytest.raises(RunFolderError, match="v_group_size is 16 there and null here"):
        compare_lengths(bench, folder)
    other = bench_of(replace(FITTED, fit="minmax"))
    with pytest.raises(RunFolderError, match='fit is "least_squares" there and null here'):
        compare_lengths(other, folder, undecided=("v_group_size", "v_word_bits"))
    assert other.chain.count.layer_tokens == 0


def test_the_chosen_window_becomes_the_options_and_a_line_of_text() -> None:
    found = comparison({0: (0.4, 0.1), 16: (0.1, 0.02)}, context_length=4096, sinks=1)
    assert found.apply(FITTED) == replace(FITTED, window=ExactWindow(16, 1))
    ratio = 0.2 * 4 ** (16 / 256) * (5 / 4) ** (17 / 256) / 4 ** (1 / 256)
    assert str(found) == f"the last 16 tokens, of 0, 16, {ratio:.2f} of the KL without at equal bytes in 4,096 tokens"
    assert found.figures["at_equal_bytes"][0] == pytest.approx(0.1 * 4 ** (1 / 256))
    broken = replace(found, kl={0: (math.inf, 1.0), 16: (0.1, 0.02)})
    assert str(broken) == "the last 16 tokens, of 0, 16 at equal bytes in 4,096 tokens"
    assert broken.figures["kl"][0] == [None, 1.0] and broken.figures["at_equal_bytes"][0] is None
