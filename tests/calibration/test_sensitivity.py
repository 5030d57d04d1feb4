"""The sensitivity table: saved to the last bit, refused when damaged, and asked for the best transform."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtuner.calibration.sensitivity import (
    TABLE_FILE,
    Candidate,
    CandidateScores,
    LayerConstants,
    SensitivityTable,
    missing_candidates,
)
from kvtuner.errors import RunFolderError
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import SEARCHED_BITS, SIDES, PrecisionPair
from kvtuner.run_folder import RunFolder
from kvtuner.transforms import candidate_transforms

if TYPE_CHECKING:
    from pathlib import Path

# Neighbours that any rounding to fewer digits would merge, the smallest and the largest double.
AWKWARD = (0.1 + 0.2, 0.3, 5e-324, 1.7976931348623157e308, 1e-300 / 3, 2 / 3)


@pytest.fixture
def table() -> SensitivityTable:
    generator = torch.Generator().manual_seed(0)
    geometry = ModelGeometry(num_layers=2, num_attention_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=16)

    def draw() -> torch.Tensor:
        return torch.randn(2, 8, generator=generator).half()

    scores = {}
    for layer in range(2):
        for side, transforms in (("k", candidate_transforms("k")), ("v", candidate_transforms("v"))):
            for bits in SEARCHED_BITS:
                for rank, transform in enumerate(transforms):
                    value = AWKWARD[(rank + layer) % len(AWKWARD)]
                    kl = value if bits == 2 else None
                    scores[Candidate(layer, side, bits, transform)] = CandidateScores(value, 0.0, value, value / 3, kl)
    return SensitivityTable(
        identity={"model": "tiny", "seed": 3, "range": [0, 511], "none": None},
        geometry=geometry,
        constants={layer: LayerConstants(draw(), draw(), draw()) for layer in range(2)},
        scores=scores,
        pairs={(1, PrecisionPair(8, 4)): 0.1 + 0.2},
        info={"calibrate_tokens": 96},
    )


def with_scores(table: SensitivityTable, values: dict[str, CandidateScores]) -> SensitivityTable:
    return replace(table, scores={Candidate(0, "k", 4, name): scores for name, scores in values.items()})


def test_a_table_comes_back_to_the_last_bit(table: SensitivityTable, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    table.save(folder)
    loaded = SensitivityTable.load(folder)
    assert loaded.scores == table.scores
    assert list(loaded.scores) == list(table.scores)
    assert (loaded.identity, loaded.geometry) == (table.identity, table.geometry)
    assert (loaded.pairs, loaded.info) == (table.pairs, table.info)
    for found, expected in zip(loaded.constants.values(), table.constants.values(), strict=True):
        for name in ("mu", "lam", "lam_centered"):
            first, second = getattr(found, name), getattr(expected, name)
            assert first.dtype == torch.float16
            assert torch.equal(first.view(torch.int16), second.view(torch.int16))
    first_text = folder.file(TABLE_FILE).read_bytes()
    loaded.save(folder)
    assert folder.file(TABLE_FILE).read_bytes() == first_text


def test_a_table_with_any_byte_changed_is_refused(table: SensitivityTable, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    table.save(folder)
    path = folder.file(TABLE_FILE)
    good = path.read_bytes()
    for position in range(5, len(good) - 2, len(good) // 60):
        if not chr(good[position]).isalnum():
            continue
        path.write_bytes(good[:position] + (b"7" if good[position] != ord("7") else b"8") + good[position + 1 :])
        with pytest.raises(RunFolderError, match="is damaged"):
            SensitivityTable.load(folder)


@pytest.mark.parametrize("keep", [0, 1, 0.5, -2])
def test_a_half_written_table_is_refused(keep: float, table: SensitivityTable, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    table.save(folder)
    path = folder.file(TABLE_FILE)
    good = path.read_bytes()
    path.write_bytes(good[: int(len(good) * keep) if 0 < keep < 1 else int(keep)])
    with pytest.raises(RunFolderError, match="is damaged"):
        SensitivityTable.load(folder)


def test_no_table_is_an_error_that_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"does not exist; run kvtuner calibrate first"):
        SensitivityTable.load(RunFolder(tmp_path))


def test_a_table_of_another_version_is_refused(table: SensitivityTable, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    table.save(folder)
    payload = folder.read_checked(TABLE_FILE)
    folder.write_checked(TABLE_FILE, payload | {"version": 2})
    with pytest.raises(RunFolderError, match="has version 2, this kvtuner reads 1"):
        SensitivityTable.load(folder)


def test_the_best_transform_has_the_lowest_value_of_the_score_that_was_asked_for(table: SensitivityTable) -> None:
    few = with_scores(
        table,
        {
            "none": CandidateScores(1, 1, e_o=1.0, fisher=3.0, kl=2.0),
            "hadamard": CandidateScores(1, 1, e_o=2.0, fisher=1.0, kl=3.0),
            "balanced": CandidateScores(1, 1, e_o=3.0, fisher=2.0, kl=1.0),
        },
    )
    assert few.best(0, "k", 4, "e_o") == ("none", 1.0)
    assert few.best(0, "k", 4, "fisher") == ("hadamard", 1.0)
    assert few.best(0, "k", 4, "kl") == ("balanced", 1.0)


def test_transforms_without_the_score_take_no_part(table: SensitivityTable) -> None:
    few = with_scores(
        table, {"none": CandidateScores(1, 1, 1, fisher=0.0), "hadamard": CandidateScores(1, 1, 1, fisher=9.0, kl=5.0)}
    )
    assert few.best(0, "k", 4, "kl") == ("hadamard", 5.0)


def test_ties_are_broken_the_same_way_in_whatever_order_candidates_come(table: SensitivityTable) -> None:
    tied = {name: CandidateScores(1, 1, 1, fisher=1.0) for name in candidate_transforms("k")}
    forwards = with_scores(table, tied).best(0, "k", 4, "fisher")
    backwards = with_scores(table, dict(reversed(tied.items()))).best(0, "k", 4, "fisher")
    assert forwards == backwards


@pytest.mark.parametrize("place", [(0, "k", 8), (1, "v", 4), (5, "k", 2)])
def test_a_score_that_was_not_measured_is_an_error_that_names_the_place(
    place: tuple[int, Any, int], table: SensitivityTable
) -> None:
    layer, side, bits = place
    with pytest.raises(RunFolderError, match=f"no 'kl' score for layer {layer} {side}{bits}"):
        table.best(layer, side, bits, "kl")


def test_what_is_missing_is_listed_by_layer_side_and_width(table: SensitivityTable) -> None:
    assert list(missing_candidates(table, "fisher")) == []
    expected = [(layer, side, bits) for layer in range(2) for side in SIDES for bits in (4, 8)]
    assert list(missing_candidates(table, "kl")) == expected


def test_scores_of_one_place_come_by_transform(table: SensitivityTable) -> None:
    found = table.of(1, "v", 2)
    assert list(found) == list(candidate_transforms("v"))
    assert found["hadamard"] == table.scores[Candidate(1, "v", 2, "hadamard")]


def test_transforms_carry_the_constants_they_need(table: SensitivityTable) -> None:
    layer = table.constants[1]
    plain = table.constants_of(1, "k", "hadamard")
    assert plain.mu is None
    assert plain.lam is None
    assert table.constants_of(1, "k", "balanced").lam is layer.lam
    centered = table.constants_of(1, "k", "centered+balanced+hadamard")
    assert centered.mu is layer.mu
    assert centered.lam is layer.lam_centered


@pytest.mark.parametrize("name", ["balanced", "centered", "centered+balanced+hadamard"])
def test_values_are_never_centered_or_balanced(name: str, table: SensitivityTable) -> None:
    with pytest.raises(ValueError, match="values have no transform"):
        table.constants_of(0, "v", name)
