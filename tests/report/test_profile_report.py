"""``kvtuner show --html``: the page says what the profile and its evaluations say, whoever wrote them."""

from __future__ import annotations

import errno
import json
import os
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from page_reader import Page, check_harmless
from profile_samples import (
    CHANNELS,
    HEADS,
    HOSTILE,
    LETTERS,
    MODEL,
    OTHER_HASH,
    PROVENANCE,
    QUALITY,
    choice,
    evaluation_of,
    hostile,
    layers_of,
    make_profile,
    stored_layers,
)

from kvtuner.exported_configs.profile.build import AskedBudget, dump_profile, uniform_profile
from kvtuner.exported_configs.profile.evaluation_record import EvaluatedProfile, dump_evaluation, evaluation_path
from kvtuner.exported_configs.profile.records import BaselineRecord, ModelIdentity, Provenance, QualityRecord
from kvtuner.layer_geometry import CacheGeometry, LayerGeometry, LayerKind
from kvtuner.precision import ExactWindow, PrecisionPair, ScaleLayout
from kvtuner.report.plots.kl_by_bits import profile_points
from kvtuner.report.profile_difference import difference_of, difference_page
from kvtuner.report.profile_report import describe, profile_page, summary

if TYPE_CHECKING:
    from pathlib import Path

    from fixture_types import RunCommand


def test_a_page_shows_the_layers_of_the_profile_in_cells_and_in_words() -> None:
    profile = make_profile(layers_of(28))
    page = check_harmless(profile_page([EvaluatedProfile("profile.json", "profile.json", profile)]))
    codes = {name: letter for letter, name in LETTERS.items()}
    assert [cells[1:] for cells in page.layers] == [
        [str(layer), str(k), str(v), codes[k_kind], codes[v_kind]]
        for layer, (k, v, k_kind, v_kind) in enumerate(stored_layers(profile))
    ]
    for layer, (k, v, k_kind, v_kind) in enumerate(stored_layers(profile)):
        keys, values = (
            f"{bits} bits" + ("" if kind == "none" else f" {kind}") for bits, kind in ((k, k_kind), (v, v_kind))
        )
        assert page.layers[layer][0] == f"layer {layer}: keys {keys}, values {values}"


def test_tokens_that_fit_hold_keys_of_indexes_beside_stored_bytes() -> None:
    latent = LayerGeometry(LayerKind("latent"), 8, 1, 512, 0, rope_dim=64, index_dim=128)
    geometry = CacheGeometry((latent, latent, replace(latent, index_dim=0)))
    profile = uniform_profile(geometry, PrecisionPair(4, 4), make_profile(layers_of(2)).model)
    stored, bf16, keys = 3 * (256 + 16 + 128), 3 * 2 * (512 + 64), 2 * (128 + 4)
    tokens = [2**30 // (size + keys) for size in (stored, bf16 // 2, bf16)]
    facts = summary(profile)
    named = ("bytes_per_token", "index_bytes_per_token", "tokens_per_gib")
    assert [facts[name] for name in named] == [stored, keys, tokens[0]]
    ratio = (bf16 + keys) / (stored + keys)
    assert f"{tokens[0]:,} tokens per GiB, {ratio:.2f}x of bf16" in " ".join(describe(profile).split())
    page = check_harmless(profile_page([EvaluatedProfile("profile.json", "profile.json", profile)]))
    sizes, fp8 = (stored, bf16 // 2, bf16), (bf16 + keys) / (bf16 // 2 + keys)
    for row in (
        [f"{size:,}" for size in sizes],
        ["with keys of indexes", *(f"{size + keys:,}" for size in sizes)],
        ["tokens per GiB", *(f"{count:,}" for count in tokens)],
        ["tokens against bf16", f"{ratio:.2f}x", f"{fp8:.2f}x", "1.00x"],
    ):
        assert any(page.cells[start : start + len(row)] == row for start in range(len(page.cells))), row
    assert difference_of(profile, profile).to_json()["tokens_per_gib"] == [tokens[0]] * 2


def test_a_page_says_identity_capacity_quality_provenance_and_how_to_serve_it() -> None:
    profile = make_profile(layers_of(9))
    page = Page(profile_page([EvaluatedProfile("profile-4bit.json", "profile-4bit.json", profile)]))
    size = profile.bytes_per_token()
    bf16 = 9 * 2 * HEADS * CHANNELS * 2
    assert {
        profile.digest,
        "4bit",
        "0.0125 [0.0110, 0.0140]",
        "K4V4 + transforms",
        "fp8",
        "nsga2, 100 trials, seed 7",
    } <= {*page.cells}
    for row in ((size, bf16 // 2, bf16), tuple(2**30 // each for each in (size, bf16 // 2, bf16))):
        cells = [f"{each:,}" for each in row]
        assert any(page.cells[start : start + 3] == cells for start in range(len(page.cells)))
    assert "python -m sglang.launch_server --model-path owner/tiny --kvtuner-profile profile-4bit.json" in page.text
    drawing = next(attributes for name, attributes in page.tags if name == "svg")
    for words in ("this profile at", "K4V4 at 5.00 bits has 0.0500 [0.0250, 0.100]", "fp8 at 8.00 bits"):
        assert words in drawing["aria-label"]


def test_a_page_of_what_was_not_measured_says_so() -> None:
    provenance = Provenance.model_validate({**PROVENANCE, "calibration": None, "search": None})
    profile = make_profile(layers_of(2), quality=None, provenance=provenance)
    page = Page(profile_page([EvaluatedProfile("p.json", "p.json", profile)]))
    assert "Not measured." in page.text and "svg" not in page.names()
    assert "nothing says what it was chosen on" in page.text


def test_a_page_of_keys_per_channel_gives_the_command_with_their_pages() -> None:
    profile = make_profile([choice()], k_layout=ScaleLayout(32, granularity="per_channel"))
    page = Page(profile_page([EvaluatedProfile("p.json", "p.json", profile)]))
    assert "launch_server" in page.text and "p.json --page-size 32" in page.text


def test_an_exact_window_is_shown_with_what_it_costs() -> None:
    profile = make_profile([choice()], window=ExactWindow(32, 4))
    page = Page(profile_page([EvaluatedProfile("p.json", "p.json", profile)]))
    native = profile.to_geometry().bf16_bytes_per_token() + 4  # of the position, in the one layer
    at_4k = f"{float(profile.effective_bits) + 16 * 36 / 4096:.3f} at 4k"
    cost = f"the last 32 tokens and the first 4 tokens exact: {36 * native:,} bytes per request"
    assert cost in page.text and at_4k in page.text
    assert "launch_server" in page.text
    assert cost in describe(profile) and "window" not in describe(make_profile([choice()]))
    facts = summary(profile)
    assert (facts["residual_length"], facts["sinks"], facts["window_bytes_per_request"]) == (32, 4, 36 * native)
    assert facts["bytes_per_token"] == summary(make_profile([choice()]))["bytes_per_token"]


def elements(page: Page) -> list[str]:
    """The names of all tags but a drawing's marks, which go by the names of baselines and have room for some."""
    return [name for name in page.names() if name not in ("rect", "path", "line", "text", "title", "circle")]


def test_hostile_text_adds_no_tag_to_a_page() -> None:
    profile = make_profile(layers_of(3))
    plain_page = check_harmless(
        profile_page([EvaluatedProfile("p.json", "p.json", profile, (evaluation_of(profile),))])
    )
    evaluation = evaluation_of(profile)
    evil = evaluation.model_copy(
        update={
            "provenance": evaluation.provenance.model_copy(update={"command": HOSTILE, "machine": HOSTILE}),
            "data": evaluation.data.model_copy(update={"corpus": HOSTILE}),
            "cells": tuple(cell.model_copy(update={"task": HOSTILE, "level": "task"}) for cell in evaluation.cells),
        }
    )
    attacked = check_harmless(profile_page([EvaluatedProfile(HOSTILE, HOSTILE, hostile(profile), (evil,))]))
    assert elements(attacked) == elements(plain_page)
    assert "alert(1)" in attacked.text
    one = difference_of(profile, profile)
    two = difference_of(hostile(profile), hostile(profile))
    names = [elements(check_harmless(difference_page(d, (n, n)))) for d, n in ((one, "p.json"), (two, HOSTILE))]
    assert names[0] == names[1]


def test_the_command_to_serve_is_one_command_whatever_the_names() -> None:
    identity = ModelIdentity.model_validate({**MODEL, "id": "x; touch $(id) `id`'", "revision": "a && b"})
    page = Page(
        profile_page(
            [EvaluatedProfile("my profile;.json", "my profile;.json", make_profile(layers_of(1), model=identity))]
        )
    )
    _, line = page.text.split("sglang.launch_server")
    words = ["--model-path", identity.id, "--revision", "a && b", "--kvtuner-profile", "my profile;.json"]
    assert shlex.split(line.split("Where it comes from")[0]) == words


def test_figures_that_no_cache_has_are_listed_and_not_drawn() -> None:
    odd = [
        {"name": name, "mean_bits": 4.0, "effective_bits": bits, "kl_mean": kl, "kl_low": low, "kl_high": high}
        for name, bits, kl, low, high in (
            ("huge", 4.0, 1e30, 1e30, 1e30),
            ("wide", 1e30, 0.1, 0.1, 0.1),
            ("upside down", 4.0, 0.1, 0.2, 0.0),
            ("\u4e2d\u6587 $x$ _a", 4.0, 1e-300, -1e-300, 1e-200),
            ("zero", 5.0, 0.0, 0.0, 0.0),
            ("below", 6.0, -0.1, -0.2, 0.1),
        )
    ]
    profile = make_profile(layers_of(2), quality=QualityRecord.model_validate({**QUALITY, "baselines": odd}))
    drawn = [point.name for point in profile_points(profile, "this")]
    assert drawn == ["this", "?? $x$ _a", "zero", "below"]
    page = check_harmless(profile_page([EvaluatedProfile("p.json", "p.json", profile)]))
    assert {"huge", "wide", "upside down"} <= set(page.cells)


@pytest.mark.slow
def test_as_many_baselines_as_a_profile_may_hold_are_drawn() -> None:
    names = [f"baseline {number}" for number in range(256)]
    many = tuple(
        BaselineRecord(
            name=name, mean_bits=4.0, effective_bits=2 + n % 60 / 4, kl_mean=n / 99, kl_low=0.0, kl_high=n / 9
        )
        for n, name in enumerate(names)
    )
    quality = QualityRecord.model_validate(QUALITY).model_copy(update={"baselines": many})
    page = Page(profile_page([EvaluatedProfile("p.json", "p.json", make_profile(layers_of(2), quality=quality))]))
    assert set(names) <= set(page.cells)


def test_show_writes_every_profile_and_evaluation_of_a_run_on_one_page(run: RunCommand, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    profiles = [make_profile(layers_of(4)), make_profile(layers_of(5), budget=AskedBudget("5bit"))]
    for name, profile in zip(("profile-4bit.json", "profile-5bit.json"), profiles, strict=True):
        (folder / name).write_bytes(dump_profile(profile))
    mine, stranger = evaluation_of(profiles[0]), evaluation_of(profiles[0], profile_digest=OTHER_HASH)
    for evaluation in (
        mine,
        stranger.model_copy(update={"provenance": mine.provenance.model_copy(update={"machine": "other"})}),
    ):
        place = evaluation_path(folder / "profile-4bit.json", evaluation)
        place.with_name(f"{place.stem}-{evaluation.provenance.machine[0]}.json").write_bytes(
            dump_evaluation(evaluation)
        )
    target = tmp_path / "new" / "page.html"
    status, out, _ = run("show", folder, "--html", target)
    assert status == 0 and out.splitlines()[-1] == f"page: {target}"
    page = check_harmless(target.read_text())
    assert {each.digest for each in profiles} <= set(page.cells)
    assert len(page.layers) == 9 and page.names().count("article") == 2
    assert "By sglang, reads fresh, 50.0% of prompts found in its cache" in page.text
    assert "0.0321 [0.0300, 0.0400]" in page.cells and "a machine" in page.cells and "other" not in page.cells
    assert "fp8: 0.0123 [0.0100, 0.0200], p 0.0010" in page.cells and "0.0777" not in page.text
    facts = json.loads(run("show", folder, "--html", target, "--json")[1])
    assert [each["page"] for each in facts] == [str(target)] * 2


def test_a_page_is_written_over_and_nothing_else_is(run: RunCommand, tmp_path: Path) -> None:
    profile = make_profile(layers_of(3))
    file, page = tmp_path / "profile.json", tmp_path / "page.html"
    file.write_bytes(dump_profile(profile))
    page.write_text("<!doctype html>\nold")
    assert run("show", file, "--html", page)[0] == 0
    assert profile.digest in page.read_text()
    before = file.read_bytes()
    for command in (("show", file), ("diff", file, file)):
        for target, words in ((file, "no HTML page"), (tmp_path, "is a folder"), (file / "x.html", "no folder")):
            status, out, err = run(*command, "--html", target)
            assert status == 2 and words in err and out == ""
        status, _, err = run(*command, "--html", tmp_path / ("x" * 5000))
        assert status == 2 and "--html" in err
    assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "profile.json"]


def test_a_full_disk_leaves_the_old_page_whole(
    run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, page = tmp_path / "profile.json", tmp_path / "page.html"
    file.write_bytes(dump_profile(make_profile(layers_of(3))))
    page.write_text("<!DOCTYPE html>\nold")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    status, _, err = run("show", file, "--html", page)
    assert status == 2 and "no space left" in err
    assert page.read_text() == "<!DOCTYPE html>\nold"


def test_several_profiles_are_listed_by_their_files(tmp_path: Path) -> None:
    shown = EvaluatedProfile("profile.json", "profile.json", make_profile(layers_of(2)))
    assert "other.json" in Page(profile_page([replace(shown, name="other.json"), shown])).cells


@pytest.mark.parametrize("with_fp8", [True, False])
def test_the_forests_legend_explains_fp8_where_it_is_shown(*, with_fp8: bool) -> None:
    profile = make_profile(layers_of(2))
    base = evaluation_of(profile)
    names = ("profile", "bf16", *(("fp8",) if with_fp8 else ()))
    results = tuple(base.cells[0].results[0].model_copy(update={"scheme": name, "mean": 0.5}) for name in names)
    cell = base.cells[0].model_copy(update={"level": "recall", "measure": "accuracy", "results": results})
    page = Page(profile_page([EvaluatedProfile("p", "p", profile, (base.model_copy(update={"cells": (cell,)}),))]))
    assert "with its paired 95% interval" in page.text
    assert ("fp8. Grey tasks" in page.text) == with_fp8
