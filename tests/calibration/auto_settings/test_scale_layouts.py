"""Two scale layouts of equal bytes are compared by the KL of the whole model, and the better one is taken."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from kvtuner.calibration.auto_settings.scale_layouts import (
    JOURNAL,
    LayoutComparison,
    compare_layouts,
    compared_width,
    equal_layouts,
)
from kvtuner.calibration.corpus import CorpusSource, load_corpus
from kvtuner.calibration.forward.simulator import LayerSpec
from kvtuner.calibration.quantization_options import QuantizationOptions
from kvtuner.calibration.transform_statistics import measure_constants
from kvtuner.calibration.workbench import IDENTITY_FILE, CalibrationOptions, Workbench
from kvtuner.errors import RunFolderError
from kvtuner.precision import PACKED_BITS, ExactWindow, ScaleLayout, check_group_size, row_bytes
from kvtuner.quant import QuantSpec, Transform, hadamard
from kvtuner.run_folder import RunFolder
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import LoadTiny

    from kvtuner.precision import Side

    Change = Callable[[torch.Tensor, torch.Tensor], None]

WIDE, SHORT = ScaleLayout(32, 32), ScaleLayout(16, 16)
HEAD_DIM = 32
LAYOUTS: dict[Side, tuple[ScaleLayout, ScaleLayout]] = {"k": (WIDE, SHORT), "v": (WIDE, SHORT)}
FITTED = QuantizationOptions(fit="least_squares", window=ExactWindow(4, 1))


@pytest.fixture
def bench_of(load_tiny: LoadTiny, corpus_file: Path) -> Callable[..., Workbench]:
    """`bench_of(change=None, quant=...)`: a workbench of a tiny model that `change` altered, its counter at 0."""

    def make(change: Change | None = None, quant: QuantizationOptions = FITTED) -> Workbench:
        loaded = load_tiny("qwen2-bias", head_dim=HEAD_DIM)
        if change is not None:
            loaded = replace(loaded, model=deepcopy(loaded.model))
            for layer in loaded.model.model.layers:
                values = layer.self_attn.v_proj
                with torch.no_grad():
                    change(values.weight.unflatten(0, (-1, HEAD_DIM)), values.bias.unflatten(0, (-1, HEAD_DIM)))
        corpus = load_corpus(
            CorpusSource(str(corpus_file), sequence_length=32, num_sequences=(3, 1, 1)), loaded.tokenizer
        )
        bench = Workbench.prepare(loaded, corpus, CalibrationOptions(quant=quant))
        bench.chain.count.layer_tokens = 0
        return bench

    return make


def values_far_from_zero(heads: torch.Tensor, bias: torch.Tensor) -> None:
    """Move one channel of all values, which the rotation makes the same number in all: no group then has a zero."""
    bias[:, 0] += 40 * heads.norm(dim=-1).mean()


def values_with_large_halves(heads: torch.Tensor, bias: torch.Tensor) -> None:
    """Make the second half of rotated values a twentieth of the first, and all of them larger."""
    size = torch.tensor([100.0, 5.0]).repeat_interleave(HEAD_DIM // 2)
    heads.copy_(hadamard(hadamard(heads.mT) * size).mT)
    bias.zero_()


@pytest.mark.parametrize("head_dim", [48, 80, 96])
def test_heads_whose_halves_the_kernels_cannot_launch_keep_wide_words(head_dim: int) -> None:
    assert equal_layouts(head_dim) is None


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_rows_of_both_layouts_take_equal_bytes_below_8_bits_and_are_longer_at_8(head_dim: int) -> None:
    layouts = equal_layouts(head_dim)
    assert layouts is not None
    wide, short = layouts
    for heads, bits in product(range(1, 9), PACKED_BITS):
        check_group_size(head_dim, bits, short.group_size)
        sizes = [row_bytes(heads, head_dim, bits, x.group_size, word_bits=x.word_bits) for x in (wide, short)]
        if bits < 8:
            assert sizes[0] == sizes[1]
        else:
            assert 0 <= sizes[1] - sizes[0] <= 4 * heads + 16


def test_short_words_must_lower_kl_by_a_tenth() -> None:
    def chosen(wide_kl: float, short_kl: float) -> int:
        return LayoutComparison("v", WIDE, SHORT, 3, wide_kl, short_kl).chosen.word_bits

    assert (chosen(0.02, 0.02), chosen(0.02, 0.0181), chosen(0.02, 0.0179), chosen(0.02, 0.03)) == (32, 32, 16, 32)
    assert (chosen(math.inf, 1.0), chosen(1.0, math.inf), chosen(math.inf, math.inf)) == (16, 32, 32)


@pytest.mark.parametrize(("widths", "bits"), [((2, 3, 4, 8), 3), ((2, 4, 8), 4), ((4, 8), 4), ((3, 8), 3)])
def test_layouts_are_compared_at_the_middle_width_below_8(widths: tuple[int, ...], bits: int) -> None:
    assert compared_width(widths) == bits


def test_a_chosen_layout_becomes_the_options_of_its_side_alone() -> None:
    short = LayoutComparison("v", WIDE, SHORT, 3, 1.0, 0.5)
    assert short.apply(FITTED) == replace(FITTED, v_layout=ScaleLayout(16, 16))
    assert replace(short, side="k").apply(FITTED) == replace(FITTED, k_layout=ScaleLayout(16, 16))
    assert replace(short, short_kl=2.0).apply(FITTED) == FITTED


@pytest.mark.parametrize("three_bits", [False, True])
def test_each_kl_is_of_the_whole_model_with_one_side_in_one_layout(
    bench_of: Callable[..., Workbench], tmp_path: Path, three_bits: bool
) -> None:
    bench = bench_of(quant=replace(FITTED, three_bits=three_bits))
    found = compare_layouts(bench, LAYOUTS, RunFolder(tmp_path))
    constants = measure_constants(bench.chain, bench.batches("calibrate"))
    simulator = bench.simulator("calibrate")
    for comparison in found:
        bits = 3 if three_bits else 4
        assert comparison.bits == bits
        for kl, group, words in ((comparison.wide_kl, 32, 32), (comparison.short_kl, 16, 16)):
            specs = {}
            for layer, constant in constants.items():
                if comparison.side == "k":
                    kind = TransformKind.parse("centered+balanced+hadamard")
                    transform = Transform(kind, constant.mu, constant.lam_centered)
                    keys = QuantSpec(bits, transform, group, False, "least_squares", word_bits=words)  # type: ignore[arg-type]  # 32 or 16
                    specs[layer] = LayerSpec(keys, None, ExactWindow(4, 1))
                else:
                    transform = Transform(TransformKind.parse("hadamard"))
                    values = QuantSpec(bits, transform, group, False, "least_squares", word_bits=words)  # type: ignore[arg-type]  # 32 or 16
                    specs[layer] = LayerSpec(None, values, ExactWindow(4, 1))
            by_sequence = simulator.measure(specs).kl.mean(dim=1)
            assert kl == pytest.approx(float(by_sequence.log().mean().exp()), rel=1e-9)


@pytest.mark.parametrize("fit", ["minmax", "least_squares"])
@pytest.mark.parametrize(
    ("change", "chosen", "least"), [(values_with_large_halves, SHORT, 1.25), (values_far_from_zero, WIDE, 1.5)]
)
def test_values_without_a_zero_keep_their_minimum_and_halves_of_two_sizes_get_a_scale_each(
    bench_of: Callable[..., Workbench], tmp_path: Path, change: Change, chosen: ScaleLayout, least: float, fit: str
) -> None:
    bench = bench_of(change, replace(FITTED, fit=fit))  # type: ignore[arg-type]  # one of FITS
    (found,) = compare_layouts(bench, {"v": (WIDE, SHORT)}, RunFolder(tmp_path))
    assert found.chosen == chosen
    assert (found.ratio if chosen == WIDE else 1 / found.ratio) > least


def test_what_a_folder_holds_is_not_measured_again_and_gives_the_same(
    bench_of: Callable[..., Workbench], tmp_path: Path
) -> None:
    folder, bench = RunFolder(tmp_path), bench_of()
    first = compare_layouts(bench, LAYOUTS, folder)
    assert bench.chain.count.layer_tokens > 0
    again = bench_of()
    assert compare_layouts(again, LAYOUTS, folder) == first
    assert again.chain.count.layer_tokens == 0
    lines = (tmp_path / JOURNAL).read_text().splitlines(keepends=True)
    assert len(lines) == 4 * 3  # layouts of both sides, sequences
    (tmp_path / JOURNAL).write_text("".join(lines[:2]) + lines[2][:40])
    assert compare_layouts(bench_of(), LAYOUTS, folder) == first
    other = bench_of(quant=replace(FITTED, symmetric=True))
    assert compare_layouts(other, LAYOUTS, folder) != first and other.chain.count.layer_tokens > 0


def test_batches_that_others_measured_are_joined_in_their_order_and_lines_of_whole_splits_are_not_read(
    bench_of: Callable[..., Workbench], tmp_path: Path
) -> None:
    alone, shared = RunFolder(tmp_path / "alone"), RunFolder(tmp_path / "shared")
    alone.create()
    first = compare_layouts(bench_of(), LAYOUTS, alone)
    records = [{name: value for name, value in line.items() if name != "crc32"} for line in alone.records(JOURNAL)]
    of_others = [record for record in records if record["batch"] == (0 if record["side"] == "k" else 2)]
    shared.create()
    shared.append(JOURNAL, *reversed(of_others))
    old = {name: value for name, value in records[0].items() if name != "batch"}
    shared.append(JOURNAL, {**old, "kl": [9.0, 9.0, 9.0]})
    bench = bench_of()
    assert compare_layouts(bench, LAYOUTS, shared) == first
    measured = list(shared.records(JOURNAL))[len(of_others) + 1 :]
    assert len(of_others) == 4 and len(measured) == 8
    assert {(record["side"], record["word_bits"], record["batch"]) for record in [*of_others, *measured]} == {
        (side, bits, batch) for side in "kv" for bits in (32, 16) for batch in range(3)
    }


def test_the_folder_of_another_run_is_refused_before_anything_is_measured(
    bench_of: Callable[..., Workbench], tmp_path: Path
) -> None:
    folder, bench = RunFolder(tmp_path), bench_of()
    chosen = bench.with_quant(replace(FITTED, k_layout=ScaleLayout(16, 16)))
    folder.check_identity(IDENTITY_FILE, chosen.identity(), "measurements")
    compare_layouts(bench, LAYOUTS, folder)  # of a run that chose short words of keys
    with pytest.raises(RunFolderError, match="k_group_size is 16 there and null here"):
        compare_layouts(bench, {"v": LAYOUTS["v"]}, folder)
    other = bench_of(quant=replace(FITTED, fit="minmax"))
    with pytest.raises(RunFolderError, match='fit is "least_squares" there and null here'):
        compare_layouts(other, LAYOUTS, folder)
    assert other.chain.count.layer_tokens == 0


def test_the_same_model_under_other_settings_keeps_the_hash_of_its_weights(bench_of: Callable[..., Workbench]) -> None:
    bench = bench_of()
    other = bench.with_quant(QuantizationOptions(symmetric=True))
    assert other.weights_sha256 is bench.weights_sha256 == bench_of().weights_sha256
    assert other.options == replace(bench.options, quant=QuantizationOptions(symmetric=True))
