"""mlx-optiq's list of layers."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from kvtuner.errors import ProfileError
from kvtuner.exported_configs.formats.conversion import write
from kvtuner.exported_configs.profile.build import uniform_profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import PrecisionPair, ScaleLayout

if TYPE_CHECKING:
    from collections.abc import Callable


def layer(number: Any, bits: Any, **more: Any) -> dict[str, Any]:
    return {"layer_idx": number, "bits": bits, **more}


def test_absent_layers_and_zero_bits_are_not_quantized(take: Callable[..., Any]) -> None:
    profile, notes = take([layer(3, 4), layer(0, 8, group_size=64), layer(2, 0, group_size=32)], "optiq")
    assert [str(pair) for pair in profile.pairs] == ["K8V8", "K16V16", "K16V16", "K4V4"]
    assert (profile.defaults.k.group_size, profile.defaults.v.group_size) == (64, 64)
    assert not profile.defaults.k.symmetric and notes == ()


def test_groups_must_agree_or_be_given(take: Callable[..., Any], refusal: Callable[..., str]) -> None:
    mixed = [layer(0, 4), layer(1, 4, group_size=32), layer(2, 2, group_size=32)]
    assert "layer 0 has 64" in refusal(mixed, "optiq") and "layer 1 has 32" in refusal(mixed, "optiq")
    profile, notes = take(mixed, "optiq", group_size=32)
    assert profile.defaults.k.group_size == 32
    assert "groups of 32 channels as --group-size says" in notes[0]


def test_groups_must_suit_the_heads(take: Callable[..., Any], refusal: Callable[..., str]) -> None:
    odd = ModelGeometry(2, 2, 1, 80, 80)
    message = refusal([layer(0, 8)], "optiq", shape=odd)
    assert "layer 0, keys: group_size 64 must divide head_dim 80" in message and "--group-size" in message
    assert take([layer(0, 8)], "optiq", shape=odd, group_size=40)[0].defaults.k.group_size == 40
    assert "values: group_size 32" in refusal(
        [layer(0, 8, group_size=32)], "optiq", shape=ModelGeometry(1, 2, 1, 64, 128)
    )


def served(text: str) -> dict[int, tuple[int, int]]:
    """Bits and group of the layers that mlx-optiq 0.7.7 quantizes: all that the file names, at the bits it says."""
    return {entry["layer_idx"]: (entry["bits"], entry.get("group_size", 64)) for entry in json.loads(text)}


def test_layers_that_are_not_quantized_are_left_out_for_the_reader_quantizes_all_it_finds(
    take: Callable[..., Any],
) -> None:
    profile = take([layer(0, 0), layer(1, 2, group_size=32), layer(3, 4, group_size=32)], "optiq")[0]
    text = write(profile, "optiq").text
    assert served(text) == {1: (2, 32), 3: (4, 32)}
    assert take(text, "optiq")[0].digest == profile.digest
    assert json.loads(write(take([], "optiq")[0], "optiq").text) == []


@pytest.mark.parametrize(
    ("head_dim", "bits", "group", "way_out"),
    [
        (128, 2, 16, "make it with groups of 32, 64 or 128 "),
        (256, 8, 256, "make it with groups of 128 ("),
        (64, 4, 16, "make it with groups of 32 or 64 ("),
        (80, 8, 80, "none of them: keep the profile's own file"),
        (96, 4, 48, "none of them: keep the profile's own file"),
    ],
)
def test_groups_that_mlx_has_not_are_refused_with_those_that_fit(
    take: Callable[..., Any], head_dim: int, bits: int, group: int, way_out: str
) -> None:
    shape = ModelGeometry(2, 8, 2, head_dim, head_dim)
    profile = take([layer(1, bits, group_size=group)], "optiq", shape=shape)[0]
    with pytest.raises(ProfileError) as refused:
        write(profile, "optiq")
    assert f"layer 1: keys are in groups of {group}, but MLX has groups of 32, 64 or 128 alone" in str(refused.value)
    assert way_out in str(refused.value)


def test_the_groups_of_the_way_out_are_written(take: Callable[..., Any]) -> None:
    for head_dim, bits, groups in ((128, 2, (32, 64, 128)), (256, 8, (128,)), (64, 4, (32, 64))):
        shape = ModelGeometry(2, 8, 2, head_dim, head_dim)
        for group in groups:
            profile = take([layer(1, bits, group_size=group)], "optiq", shape=shape)[0]
            assert served(write(profile, "optiq").text) == {1: (bits, group)}


def test_a_group_of_layers_that_are_not_quantized_refuses_nothing(take: Callable[..., Any]) -> None:
    profile = take([layer(2, 0)], "optiq", group_size=16)[0]
    assert profile.defaults.k.group_size == 16 and write(profile, "optiq").text == "[]\n"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ([layer(4, 4)], "layers 0-3, but the file names layer 4"),
        ([layer(-1, 4)], "names layer -1"),
        ([layer(10**19, 4)], "names layer 10000000000000000000"),
        ([layer(0, 4), layer(0, 4)], "entry 1: layer 0 stands twice"),
        ([layer(0, 3)], "bits must be 0 (not quantized), 2, 4 or 8, not 3"),
        ([layer(0, 16)], "bits must be 0"),
        ([layer(0, -4)], "bits must be 0"),
        ([layer(0.0, 4)], "must be integers"),
        ([layer(False, 4)], "must be integers"),
        ([layer(0, 4.0)], "must be integers"),
        ([layer(0, "4")], "must be integers"),
        ([layer(0, None)], "must be integers"),
        ([layer(0, 4, group_size=None)], "must be integers"),
        ([layer(0, 4, group_size=0)], "layer 0, keys: group_size 0"),
        ([layer(0, 4, group_size=-64)], "layer 0, keys: group_size -64"),
        ([layer(0, 4, group_size=10**19)], "layer 0, keys: group_size 1000"),
        ([layer(0, 4, mode="affine")], "entry 0 must have layer_idx, bits"),
        ([{"layer_idx": 0}], "entry 0 must have layer_idx, bits"),
        ([[0, 4]], "entry 0 must have layer_idx, bits"),
        ({"0": 4}, "must be a JSON list"),
        ("[" * 200000, "must nest at most 64 deep"),
        ("null", "must be a JSON list"),
        ('[{"layer_idx": 0, "bits": 4, "bits": 8}]', "'bits' stands twice"),
        ('[{"layer_idx": NaN, "bits": 4}]', "must be integers"),
    ],
)
def test_what_is_no_list_of_the_model_s_layers_is_refused(refusal: Callable[..., str], source: Any, says: str) -> None:
    assert says in refusal(source, "optiq")


@pytest.mark.parametrize("group_size", [0, -1])
def test_a_group_of_no_channels_is_refused(refusal: Callable[..., str], group_size: int) -> None:
    assert "--group-size must be at least 1" in refusal([layer(0, 4)], "optiq", group_size=group_size)


@pytest.mark.parametrize(
    ("pair", "options", "says"),
    [
        ((8, 4), {}, "layer 0: K8V4 has other bits for keys"),
        ((4, 4), {"symmetric": True}, "layer 0: keys are symmetric"),
        ((4, 4), {"fit": "least_squares"}, "layer 0: keys are fitted by least squares"),
        ((4, 4), {}, "layer 0: values are in groups of 64, not 128"),
        ((4, 4), {"k_layout": ScaleLayout(64, granularity="per_channel")}, "layer 0: keys are per channel"),
    ],
)
def test_other_storage_is_refused_by_layer_and_loss(
    take: Callable[..., Any], geometry: ModelGeometry, pair: tuple[int, int], options: Any, says: str
) -> None:
    model = take([], "optiq")[0].model
    with pytest.raises(ProfileError, match=re.escape(says)):
        write(uniform_profile(geometry, PrecisionPair(*pair), model, **options), "optiq")
    with pytest.raises(ProfileError, match="leave --lossy out"):
        write(take([], "optiq")[0], "optiq", lossy=True)
