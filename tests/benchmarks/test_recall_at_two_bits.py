"""The recall of schemes at 2 bits: what each stores, and a page that is that of its JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import recall_at_two_bits  # noqa: E402
import search_quality  # noqa: E402
import search_variants  # noqa: E402

from kvtuner.pipeline.options import MeasurementOptions  # noqa: E402
from kvtuner.precision import ExactWindow  # noqa: E402

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("recall-*.json"))


def test_every_scheme_takes_its_grids_from_a_variant_of_the_searches() -> None:
    variants = search_variants.VARIANTS
    for scheme in recall_at_two_bits.SCHEMES:
        settings = variants[scheme.variant]
        assert ("min-max" in scheme.name) == (settings.fit == "minmax")
        assert ("last 32" in scheme.name) == (scheme.window.residual_length == 32)
        # A searched profile has the window that it was measured with.
        assert not scheme.is_searched or settings.window == scheme.window


def test_the_page_has_a_share_with_its_interval_for_every_length() -> None:
    cells: list[dict[str, Any]] = [
        {"tokens": 256, "bf16": [1.0, 0.97, 1.0], "profile": [0.7, 0.61, 0.78]},
        {"tokens": 512, "bf16": [0.975, 0.93, 0.99], "profile": [0.5, 0.4, 0.6]},
    ]
    schemes = [{"scheme": "K2V2, fitted", "stored_bits": 3.0, "lengths": cells}]
    text = recall_at_two_bits.markdown({"notes": ["A note."], "schemes": schemes})
    assert "| scheme | stored bits of rows | 256 tokens | 512 tokens |" in text
    assert "| unquantized | - | 100.0 % (97.0 to 100.0) | 97.5 % (93.0 to 99.0) |" in text
    assert "| K2V2, fitted | 3.00 | 70.0 % (61.0 to 78.0) | 50.0 % (40.0 to 60.0) |" in text


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_committed_page_is_that_of_its_json(file: Path) -> None:
    result = json.loads(file.read_text(encoding="utf-8"))
    assert file.with_suffix(".md").read_text(encoding="utf-8") == recall_at_two_bits.markdown(result)
    for scheme in result["schemes"]:
        for cell in scheme["lengths"]:
            assert cell["profile"][1] <= cell["profile"][0] <= cell["profile"][2]


@pytest.mark.slow
def test_a_profile_stores_what_its_variant_measured(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    search_quality.add_arguments(parser)
    args = parser.parse_args(["--out", str(tmp_path), *["--sequence-length", "96", "--sequences", "1", "1", "2"]])
    measurement = MeasurementOptions(word_bits="16", k_group_size=32, residual_length=8, score="fisher")
    model = search_quality.prepare("demo", tmp_path, args, measurement)
    scheme = recall_at_two_bits.RecallScheme("K2V2", "any", ExactWindow(8))
    configuration = recall_at_two_bits.configuration_of(scheme, model, args)
    profile = recall_at_two_bits.profile_of_scheme(scheme, model, configuration)
    defaults = profile.defaults
    assert (defaults.k.group_size, defaults.k.word_bits, defaults.v.group_size, defaults.v.word_bits) == (
        32,
        16,
        64,
        16,
    )
    assert (defaults.k.fit, profile.window, set(map(str, profile.pairs))) == ("least_squares", ExactWindow(8), {"K2V2"})
