"""Profiles whose layers differ, as text, facts, pages, cards and beside one another."""

from __future__ import annotations

from pathlib import Path

import pytest
from profile_samples import choice, layers_of, make_profile

from kvtuner.exported_configs.profile.evaluation_record import EvaluatedProfile
from kvtuner.exported_configs.profile.layer_storage import LayerRecord
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.sharing.card import card
from kvtuner.precision import ExactWindow, ScaleLayout
from kvtuner.report.layer_strip import Terminal, profile_strip
from kvtuner.report.profile_difference import difference_lines, difference_of, difference_page
from kvtuner.report.profile_report import describe, profile_page, summary

VECTORS = Path(__file__).resolve().parents[2] / "exported_configs" / "vectors" / "valid"
BY_LAYER = ("gaps", "windows", "two-geometries", "latents")
NAMES = ("a.json", "b.json")
PROFILES = {name: load_profile(VECTORS / f"{name}.json") for name in (*BY_LAYER, "uniform")}


def test_strip_shows_each_layer_in_its_place_and_marks_those_that_store_nothing() -> None:
    lines = profile_strip(PROFILES["gaps"], Terminal())
    assert lines[:3] == ["layer       |0        |10", "K bits      ...4...F...8", "V bits      ...2...8...4"]
    assert "=stores nothing" in lines[-2]
    assert not any("=stores nothing" in line for line in profile_strip(PROFILES["windows"], Terminal()))
    assert profile_strip(PROFILES["gaps"], Terminal(has_colour=True))[1].startswith("K bits      ...\x1b")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gaps", ["kind none", "layers 0-2, 4-6, 8-10: no cache", "layers 3, 7, 11: 2 KV heads of 32 and 32 channels"]),
        ("windows", ["kind window:128", "layers 0, 2: 2 KV heads", "kind full", "layers 1, 3: 2 KV heads"]),
        ("two-geometries", ["kind window:1024", "4 KV heads of 16 and 16", "1 KV heads of 64 and 64", "kind shared:2"]),
        ("latents", ["kind latent", "layers 0-1, 3: a latent of 64 channels and 16 rotary ones, 16 query heads"]),
    ],
)
def test_text_and_page_name_the_layers_of_each_kind_and_shape(name: str, wanted: list[str]) -> None:
    profile = PROFILES[name]
    text, page = describe(profile), profile_page([EvaluatedProfile("profile.json", "profile.json", profile, ())])
    for part in wanted:
        assert part in text and part in page
    assert "--kvtuner-profile profile.json" in page
    layers = summary(profile)["layers"]
    assert [row["layer"] for row in layers] == [entry.layer for entry in profile.layers]


def test_a_card_serves_keys_per_channel_in_pages_of_whole_groups() -> None:
    profile = make_profile([choice()], k_layout=ScaleLayout(32, granularity="per_channel"), window=ExactWindow(32))
    text = card("me/model", [EvaluatedProfile("p.json", "p.json", profile, ())], license_id="mit")
    assert "--kvtuner-profile p.json --page-size 32\n" in text


@pytest.mark.parametrize("name", BY_LAYER)
def test_card_states_bytes_and_the_ids_at_both_ends(name: str) -> None:
    profile = PROFILES[name]
    text = card("me/model", [EvaluatedProfile("profile.json", "profile.json", profile, ())], license_id="mit")
    assert f"{profile.bytes_per_token():,} bytes per token in place of {profile.bf16_bytes_per_token():,}" in text
    assert f"  {profile.layers[0].layer}-{profile.layers[-1].layer}\n" in text
    assert "Layers that store something from the first to the last" in text


@pytest.mark.parametrize("first", BY_LAYER)
@pytest.mark.parametrize("second", PROFILES)
def test_any_two_are_compared_by_the_layers_that_both_store(first: str, second: str) -> None:
    one, other = PROFILES[first], PROFILES[second]
    difference = difference_of(one, other)
    assert ("kinds" in difference.geometry) == (first != second)
    same = [entry.layer for entry in one.layers] == [entry.layer for entry in other.layers]
    assert (difference.layers is not None) == same
    assert difference_lines(difference, Terminal(), NAMES) and difference_page(difference, NAMES)


def test_layers_that_changed_are_named_by_their_ids() -> None:
    profile = PROFILES["gaps"]
    layers = [entry.model_dump(by_alias=True) for entry in profile.layers]
    layers[1]["v"]["bits"] = 4
    changed = profile.model_copy(update={"layers": tuple(LayerRecord.model_validate(layer) for layer in layers)})
    difference = difference_of(profile, changed)
    assert difference.layers is not None and [change.layer for change in difference.layers] == [7]
    marks = next(line for line in difference_lines(difference, Terminal(), NAMES) if line.startswith("changed"))
    assert marks.split(" ", 1)[1].rstrip().endswith("^") and marks.rstrip().index("^") - len("1 K transform ") == 7


def test_group_of_a_layers_own_is_a_change_of_that_layer() -> None:
    profile = PROFILES["gaps"]
    layers = [entry.model_dump(by_alias=True) for entry in profile.layers]
    layers[2]["v"]["group_size"] = 16
    changed = profile.model_copy(update={"layers": tuple(LayerRecord.model_validate(layer) for layer in layers)})
    difference = difference_of(profile, changed)
    assert difference.layers is not None
    assert [(change.layer, change.changed) for change in difference.layers] == [(11, ("group_size",))]
    lines = difference_lines(difference, Terminal(), NAMES)
    assert next(line for line in lines if line.startswith("changed")).rstrip().index("^") - len("1 K transform ") == 11
    assert next(line for line in lines if line.startswith("layer 11")).endswith("groups -/16")


def test_difference_explains_a_gap_that_only_one_strip_has() -> None:
    gaps, full = PROFILES["gaps"], make_profile(layers_of(10))
    for difference in (difference_of(gaps, gaps), difference_of(gaps, full), difference_of(full, gaps)):
        assert any("=stores nothing" in line for line in difference_lines(difference, Terminal(), NAMES))
    assert not any("=stores nothing" in line for line in difference_lines(difference_of(full, full), Terminal(), NAMES))
