"""Building, writing and reading back."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtuner.errors import PrecisionError, ProfileError
from kvtuner.exported_configs.profile import build
from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, dump_profile, place_constants
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.records import QualityRecord
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import ALL_BITS, FITS, ExactWindow, ScaleLayout
from kvtuner.quant import Transform

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvtuner.exported_configs.profile.profile import Profile


def test_dumped_profile_loads_equal_and_dumps_the_same_bytes(profile: Profile, tmp_path: Path) -> None:
    data = dump_profile(profile)
    path = tmp_path / "profile.json"
    path.write_bytes(data)
    for source in (data, path, str(path)):
        reloaded = load_profile(source)
        assert reloaded == profile
        assert dump_profile(reloaded) == data


def test_same_choices_give_the_same_bytes(make_profile: Callable[..., Profile], profile: Profile) -> None:
    assert dump_profile(make_profile()) == dump_profile(profile)


def test_random_profiles_survive_the_file_bit_for_bit(
    make_profile: Callable[..., Profile], make_transform: Callable[..., Transform]
) -> None:
    chance = random.Random(5)
    steps = ("centered", "balanced", "hadamard")
    names = ["+".join(steps[i] for i in range(3) if n >> i & 1) or "none" for n in range(8)]
    for seed in range(12):
        heads, head_dim = chance.choice([(1, 128), (5, 80), (2, 96), (3, 16), (8, 64)])
        bits = [(chance.choice(ALL_BITS), chance.choice(ALL_BITS)) for _ in range(chance.randint(1, 6))]
        transforms = [make_transform(chance.choice(names), heads, head_dim, seed) for _ in bits]
        layers = [
            LayerQuantization(k, v, k_transform=transform if k != 16 else Transform())
            for (k, v), transform in zip(bits, transforms, strict=True)
        ]
        geometry = ModelGeometry(len(layers), heads * 4, heads, head_dim, head_dim)
        built = make_profile(
            geometry=geometry,
            layers=layers,
            k_layout=ScaleLayout(head_dim),
            v_layout=ScaleLayout(head_dim),
            symmetric=bool(seed % 2),
            fit=FITS[seed // 2 % 2],
            budget=AskedBudget("4bit"),
        )
        reloaded = load_profile(dump_profile(built))
        assert [(pair.k_bits, pair.v_bits) for pair in reloaded.pairs] == bits
        for number, layer in enumerate(layers):
            spec = reloaded.quant_spec(number, "k")
            if spec is None:
                continue
            assert (spec.symmetric, spec.fit) == (bool(seed % 2), FITS[seed // 2 % 2])
            assert str(spec.transform.kind) == str(layer.k_transform.kind)
            for actual, expected in (
                (spec.transform.mu, layer.k_transform.mu),
                (spec.transform.lam, layer.k_transform.lam),
            ):
                assert actual is expected is None or (actual is not None and torch.equal(actual, expected))


def test_profile_is_of_the_first_version_that_can_hold_it(make_profile: Callable[..., Profile]) -> None:
    plain, fitted = (json.loads(dump_profile(make_profile(fit=fit))) for fit in FITS)
    assert (plain["schema_version"], fitted["schema_version"]) == (1, 2)
    assert [side.get("fit") for side in plain["defaults"].values()] == [None, None]
    assert [side.get("fit") for side in fitted["defaults"].values()] == ["least_squares"] * 2


def test_profile_with_an_exact_window_is_of_the_second_version_whatever_its_fit(
    make_profile: Callable[..., Profile],
) -> None:
    for fit, window in product(FITS, (ExactWindow(32), ExactWindow(0, 4), ExactWindow(1024, 64))):
        built = make_profile(fit=fit, window=window)
        document = json.loads(dump_profile(built))
        assert (document["schema_version"], document["defaults"]["k"]["fit"]) == (2, fit)
        assert document.get("residual_length", 0) == window.residual_length
        assert document.get("sinks", 0) == window.sinks
        assert load_profile(dump_profile(built)).window == window == built.window
        assert str(window) in repr(built) == str(built)
    plain = make_profile()
    assert plain.window == ExactWindow() and plain.schema_version == 1 and "exact" not in repr(plain)


def test_zero_window_in_a_file_has_the_digest_of_none(make_profile: Callable[..., Profile]) -> None:
    fitted = make_profile(fit="least_squares")
    document = {**json.loads(dump_profile(fitted)), "residual_length": 0, "sinks": 0}
    reloaded = load_profile(json.dumps(document).encode())
    assert (reloaded.digest, reloaded.window) == (fitted.digest, ExactWindow())


def test_file_is_readable_and_in_the_order_of_the_format(profile: Profile) -> None:
    text = dump_profile(profile).decode()
    document = json.loads(text)
    assert text.endswith("}\n") and text.startswith('{\n "schema_version": 1,\n "digest": "sha256:')
    assert list(document) == [
        "schema_version", "digest", "layout", "model", "geometry", "defaults", "layers", "budget", "quality",
        "provenance",
    ]  # fmt: skip
    assert document["layers"][0] == {"layer": 0, "k": {"bits": 8, "transform": "none"}, "v": {"bits": 4}}
    assert list(document["layers"][1]["k"]) == ["bits", "transform", "mu", "lambda"]
    assert document["layers"][1]["v"] == {"bits": 2, "transform": "hadamard"}
    assert document["layers"][2] == {"layer": 2, "k": {"bits": 16}, "v": {"bits": 16}}
    assert document["layers"][3] == {"layer": 3, "k": {"bits": 2}, "v": {"bits": 8}}


def test_text_outside_ascii_is_kept_as_utf_8(make_profile: Callable[..., Profile]) -> None:
    profile = make_profile(budget=AskedBudget("4bit für München"))
    assert "für München".encode() in dump_profile(profile)
    assert load_profile(dump_profile(profile)).budget.asked == "4bit für München"


def test_floats_keep_six_significant_digits(make_profile: Callable[..., Profile], profile: Profile) -> None:
    assert profile.quality is not None
    values = {"predicted_kl": 0.00123456789, "kl_p99": 1 / 3, "perplexity": 123456.789, "top1_agreement": 1.0}
    built = make_profile(quality=QualityRecord.model_validate({**profile.quality.model_dump(), **values}))
    quality = json.loads(dump_profile(built))["quality"]
    kept = {name: quality[name] for name in values}
    assert kept == {"predicted_kl": 0.00123457, "kl_p99": 0.333333, "perplexity": 123457.0, "top1_agreement": 1.0}
    assert load_profile(dump_profile(built)) == built


def test_profile_that_nobody_measured_says_so(make_profile: Callable[..., Profile], profile: Profile) -> None:
    by_hand = profile.provenance.model_copy(update={"calibration": None, "search": None})
    built = make_profile(quality=None, provenance=by_hand)
    document = json.loads(dump_profile(built))
    assert document["quality"] is None
    assert document["provenance"]["calibration"] is None
    assert load_profile(dump_profile(built)) == built


def test_default_transform_is_the_most_common_of_packed_layers_and_alphabetical_among_equals(
    make_profile: Callable[..., Profile], make_transform: Callable[..., Transform]
) -> None:
    rotated, balanced = make_transform("hadamard"), make_transform("balanced")
    layers = [
        LayerQuantization(16, 16),
        LayerQuantization(16, 16),
        LayerQuantization(16, 4),
        LayerQuantization(4, 4, rotated, rotated),
        LayerQuantization(4, 4, balanced, rotated),
    ]
    defaults = make_profile(layers=layers).defaults
    assert (defaults.k.transform, defaults.v.transform) == ("balanced", "hadamard")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"k_bits": 16}, "layers\\[3\\].k: 16 bits are stored as they are, but transform is 'hadamard'"),
        ({"k_bits": 16, "k_transform": "balanced"}, "layers\\[3\\].k: 16 bits are stored as they are"),
        ({"v_transform": "balanced"}, "layers\\[3\\].v.transform: must be 'none' or 'hadamard', not 'balanced'"),
    ],
)
def test_choices_that_a_profile_cannot_hold_name_the_layer(
    make_profile: Callable[..., Profile],
    make_transform: Callable[..., Transform],
    choices: tuple[LayerQuantization, ...],
    choice: dict[str, Any],
    message: str,
) -> None:
    changes = {name: make_transform(value) if isinstance(value, str) else value for name, value in choice.items()}
    layers = [*choices[:3], replace(choices[3], **changes), choices[4]]
    with pytest.raises(ProfileError, match=message):
        make_profile(layers=layers)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "data must be finite"),
        (float("inf"), "data must be finite"),
        (0.0, r"must lie within \[1/64, 64\], but holds 0;"),
        (65.0, r"must lie within \[1/64, 64\], but holds 65;"),
        (-1.0, r"must lie within \[1/64, 64\], but holds -1;"),
    ],
)
def test_lambda_outside_its_range_is_refused(
    make_profile: Callable[..., Profile], choices: tuple[LayerQuantization, ...], value: float, message: str
) -> None:
    transform = choices[1].k_transform
    assert transform.lam is not None
    lam = transform.lam.clone()
    lam[1, 7] = value
    layers = [choices[0], replace(choices[1], k_transform=replace(transform, lam=lam)), *choices[2:]]
    with pytest.raises(ProfileError, match=rf"layers\[1\].k.lambda: {message}"):
        make_profile(layers=layers)


def test_constants_of_other_heads_are_refused(
    make_profile: Callable[..., Profile],
    make_transform: Callable[..., Transform],
    choices: tuple[LayerQuantization, ...],
) -> None:
    layers = [*choices[:4], replace(choices[4], k_transform=make_transform("centered", heads=2))]
    with pytest.raises(ProfileError, match=r"layers\[4\].k.mu: shape must be .* \[3, 48\], not \[2, 48\]"):
        make_profile(layers=layers)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k_layout": ScaleLayout(20)}, PrecisionError, "group_size 20 must divide head_dim 48"),
        (
            {"k_layout": ScaleLayout(0)},
            ProfileError,
            "defaults.k.group_size: must be greater than or equal to 1, not 0",
        ),
        ({"budget": AskedBudget("4bit", tp_size=2)}, ProfileError, "tp_size 2 does not divide num_kv_heads 3"),
        ({"budget": AskedBudget("4bit", pp_size=6)}, ProfileError, "pp_size 6 does not fit 5 layers"),
        ({"budget": AskedBudget("4bit\n")}, ProfileError, "budget.asked: must be printable"),
        ({"geometry": ModelGeometry(4, 6, 3, 48, 32)}, ProfileError, "num_layers 4, but 5 layers were chosen"),
        (
            {"geometry": ModelGeometry(5, 2048, 1, 48, 32)},
            ProfileError,
            "geometry.num_attention_heads: must be less than",
        ),
        ({"geometry": ModelGeometry(5, 6, 3, 48, 32), "layers": []}, ProfileError, "but 0 layers were chosen"),
        (
            {"layers": [LayerQuantization(5, 4)] * 5},
            ProfileError,
            r"layers\[0\].k.bits: must be 2, 3, 4, 8 or 16, not 5",
        ),
    ],
)
def test_what_rows_or_the_format_cannot_hold_is_refused(
    make_profile: Callable[..., Profile], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_profile(**changes)


def test_profile_too_large_to_be_loaded_is_not_written(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(dump_profile(profile))
    monkeypatch.setattr(build, "MAX_PROFILE_BYTES", size - 1)
    with pytest.raises(ProfileError, match=f"at most {size - 1} bytes, but this one has {size}"):
        dump_profile(profile)


@pytest.mark.parametrize(
    ("changes", "layer", "refusal"),
    [
        ({}, {}, None),
        ({"symmetric": True}, {"k_bits": 2}, None),
        ({}, {"k_bits": 16, "k_group_size": 16}, None),  # of 16 bits nothing is grouped
        ({}, {"k_bits": 3}, "schema_version 1 has no layers of 3 bits, version 2 has"),
        ({}, {"v_group_size": 16}, "layers[0].v.group_size: schema_version 1 has none"),
        ({"fit": "least_squares"}, {}, "defaults.k.fit: schema_version 1 has none"),
        ({"v_layout": ScaleLayout(32, 16)}, {}, "defaults.v.word_bits: schema_version 1 has none"),
        ({"window": ExactWindow(0, 4)}, {}, "sinks: schema_version 1 has none"),
    ],
)
def test_whatever_the_first_version_lacks_makes_the_second_and_is_refused_in_the_first(
    make_profile: Callable[..., Profile],
    choices: tuple[LayerQuantization, ...],
    changes: Any,
    layer: Any,
    refusal: str | None,
) -> None:
    profile = make_profile(layers=[replace(choices[0], **layer), *choices[1:]], **changes)
    assert profile.schema_version == (1 if refusal is None else 2)
    in_file = place_constants(profile, "file")
    assert in_file.schema_version == 2
    assert dump_profile(place_constants(in_file, "inline")) == dump_profile(profile)
    if refusal is not None:
        document = json.loads(dump_profile(profile)) | {"schema_version": 1}
        if "least_squares" not in changes.values():
            for side in document["defaults"].values():
                del side["fit"]
        with pytest.raises(ProfileError, match=re.escape(f"{refusal}; export the profile again")):
            load_profile(json.dumps(document).encode())
