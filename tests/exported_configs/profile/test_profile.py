"""What a profile says of its layers, against numbers worked out by hand."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch

from kvtuner.errors import GeometryError, PrecisionError, ProfileError
from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, dump_profile
from kvtuner.exported_configs.profile.layer_storage import KeyTransform, ValueTransform
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.profile import Profile
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import LAYOUT_ID, ExactWindow, PrecisionPair, RowShape, ScaleLayout
from kvtuner.quant import QuantSpec
from kvtuner.transforms import candidate_transforms, transform_names

if TYPE_CHECKING:
    from collections.abc import Callable


class Config(SimpleNamespace):
    """What `check_model` reads of a transformers configuration."""

    def get_text_config(self, decoder: bool = False) -> Config:
        return self


def config(**changes: int) -> Config:
    counts = {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 48}
    return Config(**{**counts, "v_head_dim": 32, **changes})


def test_format_names_the_layout_and_the_transforms_of_the_numerics() -> None:
    assert get_args(Profile.model_fields["layout"].annotation) == (LAYOUT_ID,)
    assert get_args(ValueTransform) == candidate_transforms("v")
    assert get_args(KeyTransform) == transform_names("k")


def test_bits_and_bytes_are_those_worked_out_by_hand(make_profile: Callable[..., Profile]) -> None:
    profile = make_profile(
        geometry=ModelGeometry(2, 4, 2, 64, 64),
        layers=[LayerQuantization(4, 2), LayerQuantization(8, 16)],
        k_layout=ScaleLayout(64),
        v_layout=ScaleLayout(64),
        budget=AskedBudget("8bit"),
    )
    # Codes + 4 bytes per head, up to 16: K4 64+8 -> 80, V2 32+8 -> 48, K8 128+8 -> 144; V16 is 2*64*2.
    assert profile.bytes_per_token() == 80 + 48 + 144 + 256
    assert profile.mean_bits == Fraction(15, 2)
    assert profile.effective_bits == Fraction(8 * 528, 2 * 2 * 128)
    # One head per rank: 32+4 -> 48, 16+4 -> 32, 64+4 -> 80, 128; replicated heads cost the same.
    assert profile.bytes_per_token(tp_size=2) == profile.bytes_per_token(tp_size=4) == 48 + 32 + 80 + 128
    assert (profile.budget.mean_bits, profile.budget.effective_bits) == (7.5, 8.25)
    assert profile.budget.bytes_per_token == 528


def test_pairs_and_shapes_follow_the_layers(profile: Profile) -> None:
    assert [str(pair) for pair in profile.pairs] == ["K8V4", "K4V2", "K16V16", "K2V8", "K4V16"]
    assert isinstance(profile.pairs[0], PrecisionPair)
    assert profile.row_shape() == RowShape(3, 48, 32, ScaleLayout(24))
    assert profile.row_shape(tp_size=3) == RowShape(1, 48, 32, ScaleLayout(24))
    assert profile.to_geometry() == ModelGeometry(5, 6, 3, 48, 32, 0)


def test_ranks_that_cannot_share_the_heads_are_refused(profile: Profile) -> None:
    with pytest.raises(GeometryError, match="tp_size 2 does not divide num_kv_heads 3"):
        profile.bytes_per_token(tp_size=2)


def test_quant_spec_holds_what_was_built_bit_for_bit(profile: Profile, choices: tuple[LayerQuantization, ...]) -> None:
    for number, choice in enumerate(choices):
        wanted = {"k": (choice.k_bits, choice.k_transform, 24), "v": (choice.v_bits, choice.v_transform, 32)}
        for side, (bits, transform, group_size) in wanted.items():
            spec = profile.quant_spec(number, side)  # type: ignore[arg-type]  # a str from the dictionary
            if bits == 16:
                assert spec is None
                continue
            assert spec is not None
            assert (spec.bits, spec.group_size, spec.symmetric, spec.fp8) == (bits, group_size, False, False)
            assert spec.transform.kind == transform.kind
            for actual, expected in ((spec.transform.mu, transform.mu), (spec.transform.lam, transform.lam)):
                assert (actual is None) == (expected is None)
                if actual is not None and expected is not None:
                    assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))


def test_quant_spec_simulates_what_the_built_transform_would(
    profile: Profile, choices: tuple[LayerQuantization, ...]
) -> None:
    keys = torch.randn(7, 3, 48, generator=torch.Generator().manual_seed(1))
    spec = profile.quant_spec(1, "k")
    assert spec is not None
    stored = choices[1].k_transform.apply(keys)
    assert torch.equal(spec.transform.apply(keys), stored)
    assert torch.equal(spec.simulate(keys), QuantSpec(4, choices[1].k_transform, 24).simulate(keys))


def test_keys_per_channel_load_and_cost_what_was_worked_out_by_hand(per_channel: Profile) -> None:
    reloaded = load_profile(dump_profile(per_channel))
    assert reloaded == per_channel and reloaded.has_per_channel_keys
    assert (reloaded.defaults.k.granularity, reloaded.defaults.v.granularity) == ("per_channel", "per_token")
    # 3 heads of 48 channels: 4 * 144 / 32 = 18 bytes of scale words a token. Values have 3 words, 12 bytes.
    keys = [144 + 18 + 14, 72 + 18 + 6, 288, 36 + 18 + 10, 288]
    values = [48 + 12 + 4, 24 + 12 + 12, 192, 96 + 12 + 4, 96 + 12 + 4]
    assert reloaded.bytes_per_token() == sum(keys) + sum(values)
    # One head: 6 bytes of words; K8 48, K4 24, K2 12.
    one_head = [64, 32, 96, 32, 96], [32, 16, 64, 48, 48]
    assert reloaded.bytes_per_token(tp_size=3) == sum(map(sum, one_head))


def test_keys_per_channel_are_quantized_by_groups_of_tokens(per_channel: Profile) -> None:
    for number, bits in enumerate((8, 4, 16, 2, 16)):
        expected = None if bits == 16 else QuantSpec(bits, token_group=32)
        assert per_channel.quant_spec(number, "k") == expected
    rotated = per_channel.quant_spec(1, "v")
    assert rotated is not None and str(rotated.transform.kind) == "hadamard"


def test_unquantized_keys_are_not_per_channel(make_profile: Callable[..., Profile]) -> None:
    layers = [LayerQuantization(16, 4)] * 5
    profile = make_profile(layers=layers, k_layout=ScaleLayout(64, granularity="per_channel"))
    assert not profile.has_per_channel_keys


@pytest.mark.parametrize("group_size", [1, 8, 15, 24, 33, 48, 256])
def test_tokens_per_scale_outside_the_set_are_refused(
    make_profile: Callable[..., Profile], choices: tuple[LayerQuantization, ...], group_size: int
) -> None:
    with pytest.raises(
        ProfileError, match=rf"group_size of \(16, 32, 64, 128\) tokens, not {group_size}; KIVI's is 32"
    ):
        make_profile(layers=choices[:1], k_layout=ScaleLayout(group_size, granularity="per_channel"))


@pytest.mark.parametrize(
    ("numbers", "place"), [((0, 0, 1), r"layers\[2\].k"), ((0, 0, 3), r"layers\[2\].k"), ((3, 4, 0), r"defaults.k")]
)
def test_transforms_of_keys_per_channel_are_refused(
    make_profile: Callable[..., Profile], choices: tuple[LayerQuantization, ...], numbers: tuple[int, ...], place: str
) -> None:
    layers = [choices[number] for number in numbers]
    with pytest.raises(ProfileError, match=place + ": per_channel keys have transform 'none', not"):
        make_profile(
            layers=layers, k_layout=ScaleLayout(16, granularity="per_channel"), budget=AskedBudget("4bit", tp_size=3)
        )


def test_a_layer_of_keys_per_channel_has_no_group_of_its_own(
    make_profile: Callable[..., Profile], put: Callable[..., Any], refusal: Callable[[bytes], str]
) -> None:
    keys = ScaleLayout(32, granularity="per_channel")
    profile = make_profile(layers=[LayerQuantization(4, 4)] * 2, k_layout=keys, window=ExactWindow(32))
    document = put(json.loads(dump_profile(profile)), ("layers", 1, "k", "group_size"), 64)
    message = refusal(json.dumps(document).encode())
    assert "layers[1].k: per_channel keys have the group_size of defaults; remove their own" in message


def test_only_widths_that_are_fitted_need_groups_whose_sums_are_exact(make_profile: Callable[..., Profile]) -> None:
    wide: dict[str, Any] = {
        "geometry": ModelGeometry(1, 1, 1, 512, 512), "k_layout": ScaleLayout(512), "v_layout": ScaleLayout(512),
        "budget": AskedBudget("8bit"),
    }  # fmt: skip
    with pytest.raises(ProfileError, match=r"layers\[0\].v: a grid is fitted to at most 256 channels, not 512"):
        make_profile(**wide, layers=[LayerQuantization(8, 4)], fit="least_squares")
    for bits, fit in (((8, 16), "least_squares"), ((8, 4), "minmax")):
        assert make_profile(**wide, layers=[LayerQuantization(*bits)], fit=fit).pairs == (PrecisionPair(*bits),)


def test_heads_that_do_not_fill_units_are_refused_per_channel_too(make_profile: Callable[..., Profile]) -> None:
    with pytest.raises(PrecisionError, match="head_dim 36 cannot be packed at 2 bits"):
        make_profile(
            geometry=ModelGeometry(1, 1, 1, 36, 32),
            layers=[LayerQuantization(2, 16)],
            k_layout=ScaleLayout(32, granularity="per_channel"),
            budget=AskedBudget("4bit"),
        )


def test_transform_name_is_none_at_16_bits_and_the_default_where_unnamed(profile: Profile) -> None:
    names = [(profile.transform_name(number, "k"), profile.transform_name(number, "v")) for number in range(5)]
    assert names == [
        ("none", "none"),
        ("centered+balanced+hadamard", "hadamard"),
        ("none", "none"),
        ("hadamard", "none"),
        ("hadamard", "none"),
    ]


def test_negative_layer_ids_do_not_wrap_around(profile: Profile) -> None:
    for number in (-1, 5):
        with pytest.raises(AssertionError, match=f"no layer {number}"):
            profile.quant_spec(number, "k")


def test_profile_fits_the_model_it_was_made_for(profile: Profile) -> None:
    profile.check_model(config())
    assert profile.to_geometry() == ModelGeometry.from_config(config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 6}, "num_layers 5, but this model has 6"),
        ({"num_attention_heads": 3}, "num_attention_heads 6, but this model has 3"),
        ({"num_key_value_heads": 6}, "num_kv_heads 3, but this model has 6"),
        ({"head_dim": 64, "num_hidden_layers": 5}, "head_dim 48, but this model has 64"),
        ({"v_head_dim": 48}, "v_head_dim 32, but this model has 48"),
        ({"num_kv_shared_layers": 1, "num_hidden_layers": 6}, "num_shared_layers 0, but this model has 1"),
        ({"num_hidden_layers": 7, "head_dim": 64}, "num_layers 5, but this model has 7"),
    ],
)
def test_profile_of_another_model_is_refused_with_both_values(
    profile: Profile, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ProfileError, match=message) as refused:
        profile.check_model(config(**changes))
    assert "owner/tiny-3.1" in str(refused.value)


def test_profile_cannot_be_changed_in_place(profile: Profile) -> None:
    for target, name in ((profile, "digest"), (profile.layers[0].k, "bits"), (profile.geometry, "head_dim")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(target, name, getattr(target, name))


def test_no_section_coerces_ignores_or_mutates(profile: Profile) -> None:
    def sections(value: Any) -> list[Any]:
        children = [getattr(value, name) for name in type(value).model_fields]
        nested = [x for c in children for x in (c if isinstance(c, tuple) else [c]) if hasattr(x, "model_fields_set")]
        return [value, *itertools.chain.from_iterable(sections(child) for child in nested)]

    parts = sections(profile)
    assert len({type(section) for section in parts}) == 20
    for section in parts:
        settings = type(section).model_config
        assert settings["strict"] and settings["frozen"] and settings["extra"] == "forbid"
