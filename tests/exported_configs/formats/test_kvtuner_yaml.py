"""The paper's presets, as its repository writes them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats.conversion import write
from kvtuner.exported_configs.profile.build import uniform_profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import ExactWindow, PrecisionPair, ScaleLayout

if TYPE_CHECKING:
    from collections.abc import Callable

PRESET = """\
0:
  nbits_key: 8
  nbits_value: 4
1:
  nbits_key: 4
  nbits_value: 2
2:
  nbits_key: 2
  nbits_value: 2
3:
  nbits_key: 16
  nbits_value: 16
"""
NAME = "Tiny-3.1B_pertoken_KVTuner4_0.yaml"
KIVI_NAME = "Tiny-3.1B_kivi_KVTuner6_1.yaml"
ONE = "0: {nbits_key: 4, nbits_value: 4}\n"


def preset(*pairs: tuple[Any, Any]) -> str:
    return "".join(f"{layer}: {{nbits_key: {k}, nbits_value: {v}}}\n" for layer, (k, v) in enumerate(pairs))


def test_a_preset_per_token_has_one_group_per_head(take: Callable[..., Any]) -> None:
    profile, notes = take(PRESET, "kvtuner-yaml", file_name=NAME)
    assert [str(pair) for pair in profile.pairs] == ["K8V4", "K4V2", "K2V2", "K16V16"]
    assert profile.defaults.model_dump() == {
        "k": {"granularity": "per_token", "group_size": 128, "symmetric": False, "transform": "none"},
        "v": {"granularity": "per_token", "group_size": 64, "symmetric": False, "transform": "none"},
    }
    assert profile.budget.asked == "imported from kvtuner-yaml"
    assert (profile.quality, profile.provenance.calibration, profile.provenance.search) == (None, None, None)
    assert notes == ()


def test_a_preset_of_kivi_has_keys_per_channel_and_says_how_it_is_served(take: Callable[..., Any]) -> None:
    profile, notes = take(PRESET.replace("16", "4"), "kvtuner-yaml", file_name=KIVI_NAME)
    assert profile.defaults.k.granularity == "per_channel" and profile.has_per_channel_keys
    assert (profile.defaults.k.group_size, profile.defaults.v.group_size) == (32, 32)
    (note,) = notes
    assert "per channel" in note and "--page-size 32" in note and "newest 32 tokens" in note
    assert profile.window == ExactWindow(32)


def test_groups_of_kivi_that_values_of_8_bits_cannot_have_need_another_size(
    take: Callable[..., Any], refusal: Callable[..., str]
) -> None:
    geometry = ModelGeometry(1, 8, 2, 128, 128)
    text = preset((4, 8))
    message = refusal(text, "kvtuner-yaml", shape=geometry, scheme="kivi")
    assert "layer 0, values: group_size 32" in message and "--group-size" in message
    profile, notes = take(text, "kvtuner-yaml", shape=geometry, scheme="kivi", group_size=64)
    assert (profile.defaults.k.group_size, profile.defaults.v.group_size) == (32, 64)
    assert any("groups of 64 channels as --group-size says" in note for note in notes)


def test_the_scheme_is_said_by_the_name_or_the_flag(take: Callable[..., Any], refusal: Callable[..., str]) -> None:
    assert "give --scheme pertoken or --scheme kivi" in refusal(PRESET, "kvtuner-yaml", file_name="my.yaml")
    for near in ("a_kivi_KVTuner5_0.yaml", "a_axis_KVTuner4_0.yaml", "_kivi_KVTuner4_0.yaml", "a_kivi_KVTuner4_0.txt"):
        assert "--scheme" in refusal(PRESET, "kvtuner-yaml", file_name=near)
    by_flag, notes = take(PRESET, "kvtuner-yaml", file_name="my.yaml", scheme="pertoken")
    assert by_flag.digest == take(PRESET, "kvtuner-yaml", file_name=NAME)[0].digest and notes == ()
    other, notes = take(PRESET, "kvtuner-yaml", file_name=KIVI_NAME, scheme="pertoken")
    assert other.digest == by_flag.digest
    assert "says kivi, but --scheme pertoken" in notes[0]


@pytest.mark.parametrize(
    ("model", "is_said"),
    [("owner/Tiny-3.1B", False), ("tiny-3.1b", False), ("owner/Tiny_3.1B", False), ("owner/Tiny-3.1B-Chat", True)],
)
def test_a_name_that_says_another_model_warns(take: Callable[..., Any], model: str, is_said: bool) -> None:
    notes = take(PRESET, "kvtuner-yaml", file_name=NAME, model=model)[1]
    assert bool(notes) == is_said
    assert not is_said or "'Tiny-3.1B', but it is imported for 'owner/Tiny-3.1B-Chat'" in notes[0]


def test_a_preset_is_the_profile_that_was_built_by_hand(take: Callable[..., Any], geometry: ModelGeometry) -> None:
    text = preset(*[(4, 2)] * 4)
    for scheme, options in (
        ("pertoken", {}),
        (
            "kivi",
            {
                "k_layout": ScaleLayout(32, granularity="per_channel"),
                "v_layout": ScaleLayout(32),
                "window": ExactWindow(32),
            },
        ),
    ):
        taken = take(text, "kvtuner-yaml", scheme=scheme)[0]
        assert taken.digest == uniform_profile(geometry, PrecisionPair(4, 2), taken.model, **options).digest


@pytest.mark.parametrize(
    ("values", "window", "says"),
    [
        (32, ExactWindow(), "no tokens exact, where the file has the last 32 tokens exact; KIVI has"),
        (32, ExactWindow(64, 4), "the last 64 tokens and the first 4 tokens exact, where the file has the last 32"),
        (64, ExactWindow(32), "values are in groups of 64, not 32; KIVI has"),
    ],
)
def test_keys_per_channel_that_are_not_all_of_kivi_s_say_what_its_preset_would_be_read_as(
    take: Callable[..., Any], geometry: ModelGeometry, values: int, window: ExactWindow, says: str
) -> None:
    layouts = {"k_layout": ScaleLayout(32, granularity="per_channel"), "v_layout": ScaleLayout(values)}
    model = take(PRESET, "kvtuner-yaml", scheme="pertoken")[0].model
    profile = uniform_profile(geometry, PrecisionPair(4, 2), model, **layouts, window=window)
    with pytest.raises(ProfileError, match="cannot say all of the profile: layer 0: ") as refused:
        write(profile, "kvtuner-yaml")
    assert says in str(refused.value) and "--lossy writes its preset, which is read and served so" in str(refused.value)
    assert "--residual-length 0" not in str(refused.value)  # without which there is no KIVI
    exported = write(profile, "kvtuner-yaml", lossy=True)
    assert "--scheme kivi" in exported.notes[0]
    preset_of_kivi = take(exported.text, "kvtuner-yaml", scheme="kivi")[0]
    assert preset_of_kivi.window == ExactWindow(32) and preset_of_kivi.defaults.v.group_size == 32
    assert write(preset_of_kivi, "kvtuner-yaml").text == exported.text


def test_what_is_written_is_what_the_paper_s_repository_writes(take: Callable[..., Any]) -> None:
    exported = write(take(PRESET, "kvtuner-yaml", scheme="pertoken")[0], "kvtuner-yaml")
    assert exported.text == PRESET
    assert "--scheme pertoken" in exported.notes[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (PRESET + "4:\n  nbits_key: 4\n  nbits_value: 4\n", "layers 0-3, but the file names layer 4"),
        (PRESET + "-1:\n  nbits_key: 4\n  nbits_value: 4\n", "names layer -1"),
        (preset((4, 4), (4, 4)), "layer 2 of 0-3 is not named; give the file's own model"),
        (preset(*[(4, 4)] * 3, (3, 4)), "layer 3: nbits_key must be 2, 4, 8 or 16, not '3'"),
        (preset(*[(4, 4)] * 3, (4, "4.0")), "layer 3: nbits_value must be"),
        (preset(*[(4, 4)] * 3, (4, "true")), "layer 3: nbits_value must be"),
        (preset(*[(4, 4)] * 3, (4, "'4'")), "layer 3: nbits_value must be"),
        (preset(*[(4, 4)] * 3, (4, "[4]")), "layer 3: nbits_value must be"),
        (PRESET.replace("1:", "'1':", 1), "layers are integers, not '1'"),
        (PRESET.replace("1:", "1.0:", 1), "layers are integers, not '1.0'"),
        (PRESET.replace("0:", "false:", 1), "layers are integers, not 'False'"),
        (PRESET.replace("0:", "~:", 1), "layers are integers, not 'None'"),
        (PRESET.replace("0:", "2001-01-01:", 1), "layers are integers"),
        (PRESET.replace("nbits_key: 8", "nbits_key: 8\n  group: 3", 1), "layer 0 must have nbits_key and nbits_value"),
        (PRESET.replace("  nbits_key: 8\n", "", 1), "layer 0 must have nbits_key and nbits_value"),
        ("", "must map every layer"),
        ("[1, 2]", "must map every layer"),
        ("0: 4", "layer 0 must have nbits_key"),
    ],
)
def test_what_is_no_preset_of_the_model_is_refused(refusal: Callable[..., str], text: str, says: str) -> None:
    assert says in refusal(text, "kvtuner-yaml", scheme="pertoken")


BOMB = "a: &a [x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]\n" for n in range(24)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "anchor or alias"),
        ("&x 0: {nbits_key: 4, nbits_value: 4}", "anchor or alias"),
        ("0: *nowhere", "anchor or alias"),
        ("0: !!python/object/apply:os.system ['true']", "YAML tag"),
        ("0: !!int '4'", "YAML tag"),
        ("!mine 0: 4", "YAML tag"),
        ("<<: {0: {nbits_key: 4, nbits_value: 4}}", "merge key"),
        (ONE + ONE, "stands twice"),
        (ONE + ONE.replace("0:", "0x0:", 1), "stands twice"),
        (ONE + ONE.replace("0:", "0.0:", 1), "stands twice"),
        ("0: {nbits_key: 4, nbits_key: 4, nbits_value: 4}", "stands twice"),
        ("[" * 500 + "]" * 500, "nests too deep"),
        ("- " * 5000 + "1", "nests too deep"),
        ("0: 0x" + "f" * 60000, "at most 20 digits"),
        ("0: 1" + ":59" * 15000, "at most 20 digits"),
        ("0: " + "1" * 5000, "at most 20 digits"),
        ("0b_: 3", "date or number"),
        ("2001-99-99: 3", "date or number"),
        ("0: 1" + ":59" * 600 + ".5", "date or number"),
        ("? {a: b}\n: 3", "must be YAML"),
        ("--- 1\n--- 2\n", "must be YAML"),
        ("=: 3", "layers are integers"),
        ("0: =", "must be YAML"),
        ("0: {nbits_key: 4", "must be YAML"),
        ("0: \x00", "must be YAML"),
        (b"0: \xff", "must be UTF-8, but byte 3"),
        (b"\xff\xfe0\x00:\x00", "must be UTF-8, but byte 0"),
        ("# " + "x" * (1 << 16), "at most 65536 bytes"),
    ],
)
def test_hostile_yaml_is_refused_in_no_time(refusal: Callable[..., str], text: str | bytes, says: str) -> None:
    start = time.perf_counter()
    assert says in refusal(text, "kvtuner-yaml", scheme="pertoken")
    assert time.perf_counter() - start < 5  # the bomb alone would build 2^24 values


@pytest.mark.parametrize(
    "options", [{"words": {"FP8": PrecisionPair(8, 8)}}, {"symmetric": False}, {"default_word": "8"}]
)
def test_options_that_mean_nothing_to_a_preset_are_refused(refusal: Callable[..., str], options: Any) -> None:
    assert "leave --" in refusal(PRESET, "kvtuner-yaml", scheme="pertoken", **options)
