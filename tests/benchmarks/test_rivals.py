"""The comparison of recipes with our searches: verdicts, stored bits and the page, without a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import rivals  # noqa: E402
from recipes import page  # noqa: E402
from recipes.ours import stored_budget  # noqa: E402

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("rivals-*.json"))


def test_a_side_is_lower_only_beyond_two_standard_errors_of_the_paired_difference() -> None:
    theirs = [0.10, 0.30, 0.20, 0.40]
    assert rivals.lower([x - 0.01 for x in theirs], theirs) == "ours"
    assert rivals.lower([x + 0.01 for x in theirs], theirs) == "theirs"
    # By sequences that are not paired the same means would not tell; differences that disagree do not either.
    assert rivals.lower([0.12, 0.27, 0.22, 0.37], theirs) == "even"


def test_a_budget_of_stored_bits_is_exact() -> None:
    for bits in (2.5, 3.375, 5.1005859375):
        assert float(stored_budget(bits).amount) == bits


def test_a_context_names_its_tokens_and_its_sequences() -> None:
    assert rivals.ContextPlan.parse("4000:2,3,6") == rivals.ContextPlan(4000, (2, 3, 6))
    flags = rivals.parser()
    assert flags.parse_args(["--out", "x", "--contexts", "64:1,1,2", "128:1,1,3"]).contexts[1].sequences == (1, 1, 3)
    with pytest.raises(SystemExit):
        flags.parse_args(["--out", "x", "--contexts", "512"])


def result_of(lower: str) -> dict[str, Any]:
    kl = {"mean": 0.25, "error": 0.01, "sequences": [0.24, 0.26]}
    ours = {"kl": {**kl, "mean": 0.5}, "bits": 2.4, "padded_bits": 3.0, "window": "last 32", "lower": lower}
    recipe = {"name": "KIVI-2", "family": "KIVI", "source": "a | paper", "bits": 2.5, "kl": kl, "ours": ours}
    none = {**recipe, "name": "OSCAR", "family": "OSCAR", "ours": None}
    search = {"budget": "2bit", "window": "none", "bits": 2.5, "padded_bits": 3.0, "kl": kl}
    search["uniform"] = {"name": "K2V2", "kl": {**kl, "mean": 1.0}}
    contexts = [{"tokens": 512, "note": "3 sequences.", "recipes": [recipe, none], "searches": [search]}]
    return {"model": "demo", "notes": ["A note."], "contexts": contexts}


def test_the_page_says_who_is_lower_and_what_per_layer_bits_gain() -> None:
    text = page.markdown(result_of("theirs"))
    assert "| KIVI-2 | a \\| paper | 2.50 | 0.25 ± 0.01 | 0.5 ± 0.01 | 2.40 (3.00), last 32 | 2.00 |" in text
    assert "THEIRS" in text
    assert "THEIRS" not in page.markdown(result_of("ours"))
    assert "| 2bit | none | 2.50 (3.00) | 0.25 ± 0.01 | 1 ± 0.01 (K2V2) | 0.25 |" in text
    assert page.picture(result_of("ours")).startswith(b"\x89PNG")


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_committed_page_is_that_of_its_json(file: Path) -> None:
    result = json.loads(file.read_text(encoding="utf-8"))
    assert file.with_suffix(".md").read_text(encoding="utf-8") == page.markdown(result)
    assert file.with_suffix(".png").exists()
    for context in result["contexts"]:
        for row in context["recipes"]:
            if row["ours"] is not None:
                assert row["ours"]["bits"] <= row["bits"] + 1e-9, row["name"]
                kls = (row["ours"]["kl"]["sequences"], row["kl"]["sequences"])
                assert row["ours"]["lower"] == rivals.lower(*kls)
