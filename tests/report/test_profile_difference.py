"""``kvtuner diff``: what changed is marked, listed and counted; quality is compared where it can be."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from page_reader import Page, check_harmless
from profile_samples import (
    BASE,
    CHANNELS,
    HASH,
    HEADS,
    MODEL,
    OTHER_HASH,
    PROVENANCE,
    choice,
    layers_of,
    make_profile,
    read_strip,
    stored_layers,
    swapped,
    transform,
    with_kl,
    with_record,
)

from kvtuner.exported_configs.profile.build import LayerQuantization, dump_profile
from kvtuner.exported_configs.profile.records import ModelIdentity, Provenance
from kvtuner.precision import ExactWindow, ScaleLayout
from kvtuner.report.layer_strip import Terminal
from kvtuner.report.profile_difference import difference_lines, difference_of, difference_page

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import RunCommand

    from kvtuner.exported_configs.profile.profile import Profile

NAMES = ("a.json", "b.json")


@pytest.mark.parametrize(
    ("other", "changed", "marks"),
    [
        (make_profile(BASE), {}, "    "),
        (make_profile(swapped(3, choice((4, 4)))), {3: ["bits"]}, "   ^"),
        (make_profile(swapped(1, choice((8, 2), "hadamard"))), {1: ["transform"]}, " ^  "),
        (make_profile(swapped(0, choice((4, 4), "centered"))), {0: ["transform"]}, "^   "),
        (make_profile(swapped(0, choice((4, 4), "balanced", seed=1))), {0: ["constants"]}, "~   "),
        (make_profile(swapped(0, choice((8, 4), "balanced", seed=1))), {0: ["bits", "constants"]}, "^   "),
        (make_profile(swapped(2, choice((16, 8)))), {2: ["bits"]}, "  ^ "),
        (make_profile(BASE, symmetric=True), {}, "    "),
    ],
    ids=["nothing", "bits", "value transform", "key transform", "constants", "both", "from 16 bits", "symmetric"],
)
def test_diff_marks_and_lists_what_changed(other: Profile, changed: dict[int, list[str]], marks: str) -> None:
    first, second = make_profile(BASE), other
    difference = difference_of(first, second)
    facts = json.loads(json.dumps(difference.to_json()))
    assert {row["layer"]: row["changed"] for row in facts["layers"]} == changed
    assert facts["same_digest"] == (first.digest == second.digest)
    lines = difference_lines(difference, Terminal(80), NAMES)
    assert read_strip(lines, "1 ") == stored_layers(first) and read_strip(lines, "2 ") == stored_layers(second)
    (row,) = (line for line in lines if line.startswith("changed"))
    assert row[14:].ljust(4) == marks
    listed = [int(line.split()[1]) for line in lines if re.match(r"layer \d", line)]
    assert listed == list(changed)
    text = " ".join(" ".join(lines).split())
    assert "1, the first, is a.json; 2, the second, is b.json" in text
    one, two = (profile.bytes_per_token() for profile in (first, second))
    ratio = "bytes the same of both" if one == two else f"bytes b.json takes {two / one:.3f}x those of a.json"
    assert ratio in text
    assert any("(other constants)" in line for line in lines) == (list(changed.values()) == [["constants"]])
    page = check_harmless(difference_page(difference, NAMES))
    assert [cells[-1] for cells in page.layers] == list(marks)
    assert all((("not changed" in cells[0]) == (mark == " ")) for cells, mark in zip(page.layers, marks, strict=True))


def test_diff_of_another_granularity_or_group_says_which() -> None:
    plain = [choice((4, 4)), choice((16, 4)), choice((2, 4))]
    first, second = make_profile(plain), make_profile(plain, k_layout=ScaleLayout(32, granularity="per_channel"))
    facts = difference_of(first, second).to_json()
    assert {row["layer"]: row["changed"] for row in facts["layers"]} == {0: ["granularity"], 2: ["granularity"]}
    assert facts["defaults"] == {"k.granularity": ["per_token", "per_channel"], "k.group_size": [16, 32]}
    lines = difference_lines(difference_of(first, second), Terminal(80), NAMES)
    assert any(line.startswith("changed") and line[14:] == "^ ^" for line in lines)
    assert any(line.startswith("layer 0") and "per channel/none" in line for line in lines)
    groups = difference_of(first, make_profile(plain, v_layout=ScaleLayout(8)))
    assert groups.to_json()["defaults"] == {"v.group_size": [16, 8]} and groups.layers == ()
    assert defaults_of(difference_lines(groups, Terminal(80), NAMES)) == [["v.group_size", "16", "8", "*"]]
    assert "v.group_size" in Page(difference_page(groups, ("a", "b"))).cells


def defaults_of(lines: list[str]) -> list[list[str]]:
    """Rows about what all quantized layers share, by any words for it."""
    return [
        line.split()
        for line in lines
        if re.search(r"granularity|group|symmetr|residual|sinks", line) and "^" not in line
    ]


def test_diff_names_each_default_that_differs_once_with_both_values() -> None:
    plain = [choice((4, 4)), choice((16, 4))]
    first = make_profile(plain)
    second = make_profile(
        plain, k_layout=ScaleLayout(32, granularity="per_channel"), v_layout=ScaleLayout(8), symmetric=True
    )
    assert defaults_of(difference_lines(difference_of(first, second), Terminal(80), NAMES)) == [
        ["k.granularity", "per_token", "per_channel", "*"],
        ["k.group_size", "16", "32", "*"],
        ["k.symmetric", "False", "True", "*"],
        ["v.group_size", "16", "8", "*"],
        ["v.symmetric", "False", "True", "*"],
    ]
    assert defaults_of(difference_lines(difference_of(second, second), Terminal(80), NAMES)) == []
    windowed = make_profile(plain, window=ExactWindow(32, 4))
    assert defaults_of(difference_lines(difference_of(first, windowed), Terminal(80), NAMES)) == [
        ["residual_length", "0", "32", "*"],
        ["sinks", "0", "4", "*"],
    ]


def test_diff_of_other_shapes_goes_as_far_as_it_can() -> None:
    first = make_profile(BASE)
    heads = difference_of(
        first, make_profile([LayerQuantization(4, 4, transform("balanced", heads=1)), *BASE[1:]], heads=1)
    )
    assert heads.geometry == {"num_kv_heads": (2, 1)}
    assert heads.layers == (), "layers of one pair and transform, whose constants cannot be compared"
    assert not heads.has_comparable_quality
    longer = difference_of(first, make_profile(layers_of(30)))
    assert longer.to_json()["layers_compared"] is False and longer.to_json()["layers"] == []
    lines = difference_lines(longer, Terminal(24), NAMES)
    assert not any(line.startswith("changed") for line in lines)
    assert read_strip(lines[: lines.index("", lines.index("") + 1)], "1 ") == stored_layers(first)
    page = Page(difference_page(longer, ("a", "b")))
    assert len(page.layers) == 34 and "no layer stands beside another" in page.text


def test_diff_keeps_what_its_json_had_and_adds_bytes_and_quality(run: RunCommand, tmp_path: Path) -> None:
    profiles = make_profile(BASE), make_profile(swapped(3, choice((8, 8))))
    files = tmp_path / "a.json", tmp_path / "b.json"
    for file, profile in zip(files, profiles, strict=True):
        file.write_bytes(dump_profile(profile))
    page = tmp_path / "diff.html"
    status, out, _ = run("diff", *files, "--json", "--exit-code", "--html", page)
    facts = json.loads(out)
    assert status == 1 and facts["page"] == str(page)
    kept = {
        "same_digest",
        "digest",
        "model",
        "geometry",
        "defaults_differ",
        "layers",
        "mean_bits",
        "bytes_per_token",
        "kl",
    }
    assert kept <= set(facts)
    assert {"layer", "first", "second"} <= set(facts["layers"][0])
    assert {"pair", "k_transform", "v_transform", "constants"} <= set(facts["layers"][0]["first"])
    sizes = [profile.bytes_per_token() for profile in profiles]
    assert facts["bytes_per_token"] == sizes and facts["tokens_per_gib"] == [2**30 // size for size in sizes]
    assert facts["bytes_ratio"] == pytest.approx(sizes[1] / sizes[0], abs=1e-6)
    assert facts["ratio_to_bf16"][0] == pytest.approx(4 * 2 * HEADS * CHANNELS * 2 / sizes[0], abs=1e-4)
    assert facts["quality"]["comparable"] and facts["quality"]["intervals_overlap"]
    assert "a.json beside b.json" in check_harmless(page.read_text()).text
    assert run("diff", *files, "--html", page)[1].splitlines()[-1] == f"page: {page}"
    assert run("diff", files[0], files[0], "--exit-code")[0] == 0
    namesake = tmp_path / "other" / "a.json"
    namesake.parent.mkdir()
    namesake.write_bytes(files[1].read_bytes())
    assert run("diff", files[0], namesake, "--html", page)[0] == 0
    assert f"{tmp_path.name}/a.json beside other/a.json" in Page(page.read_text()).text


@pytest.mark.parametrize(
    ("limits", "overlap", "verdict"),
    [
        ((0.013, 0.02, 0.03), True, "shows neither to be better"),
        ((0.014, 0.02, 0.03), True, "shows neither to be better"),
        ((0.0141, 0.02, 0.03), False, "the first is better"),
        ((0.001, 0.002, 0.0109), False, "the second is better"),
    ],
)
def test_quality_on_the_same_tokens_is_judged_by_its_intervals(
    limits: tuple[float, float, float], overlap: bool, verdict: str
) -> None:
    first = make_profile(BASE)
    difference = difference_of(first, with_kl(first, *limits))
    assert difference.has_comparable_quality and difference.intervals_overlap == overlap
    assert verdict in difference.quality_text() and "same tokens" in difference.quality_text()


def test_quality_that_was_measured_otherwise_is_not_compared() -> None:
    first = make_profile(BASE)
    texts = {"calibrate": HASH, "select": HASH, "report": OTHER_HASH}
    others = {
        "report text": with_record(first, token_ids_sha256=texts),
        "positions": with_record(first, position_range=[0, 511]),
        "read plan": with_kl(first, 0.1, 0.2, 0.3, read_plan="cache"),
        "model": make_profile(BASE, model=ModelIdentity.model_validate({**MODEL, "config_sha256": OTHER_HASH})),
        "dtype": make_profile(BASE, model=ModelIdentity.model_validate({**MODEL, "dtype": "float32"})),
    }
    for name, other in others.items():
        difference = difference_of(first, other)
        assert difference.apart == (name,) and not difference.has_comparable_quality
        text = difference.quality_text()
        assert "not comparable" in text and name in text and "better" not in text
    longer = with_kl(first, 0.1, 0.2, 0.3, split_tokens=4097)
    assert difference_of(first, longer).apart == ("report text",)
    trained = with_record(first, token_ids_sha256={**texts, "report": HASH, "select": OTHER_HASH}, seed=8)
    assert difference_of(first, trained).has_comparable_quality, "what was calibrated on may differ"
    unknown = make_profile(BASE, provenance=Provenance.model_validate({**PROVENANCE, "calibration": None}))
    assert difference_of(unknown, unknown).apart == ("report text", "positions")
    bare = difference_of(first, make_profile(BASE, quality=None))
    assert not bare.has_comparable_quality and "not measured of the second" in bare.quality_text()


@pytest.mark.parametrize(
    ("changes", "others", "apart"),
    [
        ({"checkpoint_sha256": HASH}, {"checkpoint_sha256": HASH}, ()),
        ({"checkpoint_sha256": HASH}, {"checkpoint_sha256": OTHER_HASH}, ("model",)),
        ({"checkpoint_sha256": HASH}, {"checkpoint_sha256": None}, ("model",)),
        ({"checkpoint_sha256": None}, {"checkpoint_sha256": None}, ("model",)),
        ({"checkpoint_sha256": HASH}, {"checkpoint_sha256": HASH, "config_sha256": OTHER_HASH}, ("model",)),
        ({"checkpoint_sha256": HASH}, {"checkpoint_sha256": HASH, "rope_sha256": OTHER_HASH}, ("model",)),
        ({"checkpoint_sha256": HASH}, {"checkpoint_sha256": HASH, "tokenizer_sha256": OTHER_HASH}, ("model",)),
    ],
)
def test_one_model_by_hub_id_and_by_folder_is_compared_where_the_weights_are_known_to_be_the_same(
    changes: dict[str, Any], others: dict[str, Any], apart: tuple[str, ...]
) -> None:
    by_id = {**MODEL, "id": "owner/tiny", "revision": "0123abcd", **changes}
    by_folder = {**MODEL, "id": "tiny-copy", "revision": None, **others}
    first, second = (make_profile(BASE, model=ModelIdentity.model_validate(each)) for each in (by_id, by_folder))
    assert difference_of(first, second).apart == apart


def test_a_picture_of_both_is_drawn_where_both_were_measured_alike() -> None:
    first = make_profile(BASE)
    alike = Page(difference_page(difference_of(first, with_kl(first, 0.1, 0.2, 0.3)), ("a", "b")))
    apart = Page(difference_page(difference_of(first, with_kl(first, 0.1, 0.2, 0.3, read_plan="hit")), ("a", "b")))
    assert (alike.names().count("svg"), apart.names().count("svg")) == (2, 4), "each for wide and narrow screens"
    words = next(attributes["aria-label"] for name, attributes in alike.tags if name == "svg")
    assert words.count("K4V4 at") == 1 and "first at" in words and "second at" in words
