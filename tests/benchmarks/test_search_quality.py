"""The comparison of searches: budgets that hold a window's copies, flags, and pages that are those of their JSON."""

from __future__ import annotations

import argparse
import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import search_quality  # noqa: E402
import search_variants  # noqa: E402

from kvtuner.errors import BudgetError  # noqa: E402
from kvtuner.pipeline.options import MeasurementOptions  # noqa: E402
from kvtuner.precision import ExactWindow  # noqa: E402

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("search-variants-*.json"))


def test_rows_get_what_the_copies_of_a_window_leave_of_a_budget() -> None:
    window = ExactWindow(residual_length=32)
    assert search_quality.rows_budget("3bit", window, 4096).amount == Fraction(23, 8)
    assert search_quality.rows_budget("4.5bpe", window, 4000).amount == Fraction(9, 2) - Fraction(512, 4000)
    # The copies of all tokens of a short request, and no more than these.
    assert search_quality.rows_budget("20bpe", ExactWindow(sinks=64), 8).amount == 4
    assert search_quality.rows_budget("3bit", window, None).amount == 3
    assert search_quality.rows_budget("3bit", ExactWindow(), 4096).amount == 3
    for text, context, reason in (("35%", 4096, "not 35%"), ("3bit", 100, "larger --context")):
        with pytest.raises(BudgetError, match=reason):
            search_quality.rows_budget(text, window, context)


def test_the_last_variant_is_what_a_search_measures_by_default() -> None:
    assert list(search_variants.VARIANTS.values())[-1] == MeasurementOptions()


def test_uniforms_in_as_many_bits_lie_on_the_line_between_two_of_their_front() -> None:
    points = [(3.0, 0.4), (4.0, 0.1), (3.5, 0.5), (5.0, 0.2), (6.0, 0.05)]
    assert search_quality.kl_at(points, 3.5) == pytest.approx(0.2)  # the uniform of 3.5 bits is worse than that of 3
    assert search_quality.kl_at(points, 4.0) == pytest.approx(0.1)
    assert search_quality.kl_at(points, 5.0) == pytest.approx(0.1 * 0.5**0.5)
    assert search_quality.kl_at(points, 2.0) == pytest.approx(0.4)
    assert search_quality.kl_at(points, 7.0) == pytest.approx(0.05)


def test_the_flags_of_a_measurement_are_those_of_a_search() -> None:
    parser = argparse.ArgumentParser()
    search_quality.add_arguments(parser)
    search_quality.add_measurement(parser)
    args = parser.parse_args(["--out", "x"])
    assert search_quality.settings_text(args) == "by default"
    flags = "--fit minmax --word-bits 16 --residual-length 0 --sinks 4 --no-three-bits --context 4096"
    args = parser.parse_args(["--out", "x", *flags.split()])
    assert search_quality.settings_text(args) == f"with {flags}"
    with pytest.raises(SystemExit):
        parser.parse_args(["--out", "x", "--residual-length", "2000"])


def variant(name: str, kl: float, less: float) -> dict[str, Any]:
    row = {"budget": "3bit", "stored_bits": 4.0, "exact": 0.5, "exact+refined": {"kl": [kl]}}
    row |= {"uniform": 2.0, "uniform_name": "K4V2", "uniform+t": 0.5, "uniform+t_name": "K3V3"}
    row |= {"uniform+t_stored_bits": 3.75, "uniforms_in_as_many": 0.4}
    return {"variant": name, "rows": [{**row, "less_uniform+t": [less, less - 0.1, less + 0.1]}]}


def test_the_page_says_the_share_of_min_max_and_who_is_lower() -> None:
    variants = [variant("min-max", 0.4, 0.0), variant("fitted", 0.2, -0.3), variant("fitted, 3 bits", 0.6, 0.2)]
    twin = [variant("fitted", 0.21, -0.3)]
    models = [{"model": "demo", "variants": variants}, {"model": "twin", "variants": twin}]
    text = search_variants.markdown({"notes": ["A note."], "models": models})
    assert "| min-max | 3bit | 4.000 | 0.5 | 0.4 | 1.00 | 2 (K4V2) | 0.5 (K3V3, 3.75) | 1.00 | even |" in text
    assert "| fitted | 3bit | 4.000 | 0.5 | 0.2 | 0.50 | 2 (K4V2) | 0.5 (K3V3, 3.75) | 0.50 | search |" in text
    assert "| 1.50 | UNIFORM |" in text
    assert "| fitted | 1.05 |" in text
    assert "| 0.21 | - |" in text  # the twin has no min-max grids to compare with


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_committed_page_is_that_of_its_json_and_ways_of_a_budget_store_as_much(file: Path) -> None:
    result = json.loads(file.read_text(encoding="utf-8"))
    assert file.with_suffix(".md").read_text(encoding="utf-8") == search_variants.markdown(result)
    for model in result["models"]:
        rows = [row for item in model["variants"] for row in item["rows"]]
        for budget in {row["budget"] for row in rows}:
            stored = [row["stored_bits"] for row in rows if row["budget"] == budget]
            least = [row["uniform+t_stored_bits"] for row in rows if row["budget"] == budget]
            # Padding lets the narrow model's rows grow in steps of half a bit.
            assert max(stored) - min(stored) < (0.45 if model["model"] == "narrow" else 0.25)
            assert max(least) <= max(stored) + 1e-9


@pytest.mark.slow
def test_a_comparison_counts_the_window_and_compares_with_the_uniform_alike(tmp_path: Path) -> None:
    argv = "--budgets 3bit --methods exact exact+refined --seeds 0 --trials 6 --sequence-length 96 --sequences 1 2 2"
    flags = "--word-bits 32 --residual-length 8 --context 1024"
    json_file = tmp_path / "quality.json"
    argv += f" {flags} --out {tmp_path} --json {json_file}"
    search_quality.main(argv.split())
    result = json.loads(json_file.read_text())
    assert result["settings"] == f"with {flags}"
    (row,) = result["rows"]
    assert row["stored_bits"] <= 4
    # 9 layers of 2 x 128 channels, in steps of a bit of a side: no uniform leaves less than these 1/8 bit over.
    assert row["uniform+t_name"] in ("K2V3", "K3V2", "K2V2")
    assert row["exact+refined"]["select_kl"][0] > 0
    assert "greedy" not in row
    assert row["uniforms_in_as_many"] <= row["uniform+t"]
    mean, low, high = row["less_uniform+t"]
    assert low <= mean <= high
    assert mean == pytest.approx(row["exact+refined"]["kl"][0] - row["uniform+t"], abs=1e-12)
