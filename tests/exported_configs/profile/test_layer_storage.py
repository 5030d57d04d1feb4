"""The digest names how a cache is stored, and nothing else; fp16 matrices survive the file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvtuner.exported_configs.profile.build import AskedBudget, LayerQuantization, dump_profile
from kvtuner.exported_configs.profile.digest import hashed_content
from kvtuner.exported_configs.profile.layer_storage import Fp16Array, encode_fp16
from kvtuner.exported_configs.profile.load import load_profile
from kvtuner.exported_configs.profile.records import QualityRecord
from kvtuner.geometry import ModelGeometry
from kvtuner.precision import ExactWindow, ScaleLayout
from kvtuner.quant import Transform
from kvtuner.run_folder import canonical_json
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.exported_configs.profile.profile import Profile

BY_HAND = (
    '{"geometry":{"head_dim":8,"num_attention_heads":2,"num_kv_heads":1,"num_layers":1,"num_shared_layers":0,'
    '"v_head_dim":8},"layers":[{"k":{"bits":2,"granularity":"per_token","group_size":8,'
    '"lambda":{"data":"ADwAPAA8ADwAPAA8ADwAPA==","dtype":"float16","shape":[1,8]},'
    '"mu":{"data":"AAAAAAAAAAAAAAAAAAAAAA==","dtype":"float16","shape":[1,8]},'
    '"symmetric":false,"transform":"centered+balanced"},"layer":0,"v":{"bits":16}}],'
    '"layout":"halfword-sliced-v1"}'
)


def nudge(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a matrix with one element in the middle one fp16 step larger in magnitude."""
    bits = tensor.clone().view(torch.int16)
    bits[1, 5] += 1
    return bits.view(torch.float16)


def test_canonical_text_of_a_tiny_profile_is_the_one_written_by_hand(make_profile: Callable[..., Profile]) -> None:
    ones, zeros = torch.ones(1, 8, dtype=torch.float16), torch.zeros(1, 8, dtype=torch.float16)
    kind = TransformKind.parse("centered+balanced")
    profile = make_profile(
        geometry=ModelGeometry(1, 2, 1, 8, 8),
        layers=[LayerQuantization(2, 16, Transform(kind, mu=zeros, lam=ones))],
        k_layout=ScaleLayout(8),
        v_layout=ScaleLayout(8),
        budget=AskedBudget("4bit"),
    )
    assert canonical_json(hashed_content(profile.layout, profile.geometry, profile.defaults, profile.layers)) == BY_HAND
    assert profile.digest == "sha256:" + hashlib.sha256(BY_HAND.encode()).hexdigest()


def test_digest_agrees_with_an_independent_expansion(
    pristine: dict[str, Any], reseal: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    assert reseal(pristine)["digest"] == pristine["digest"]


def test_digest_of_keys_per_channel_agrees_with_an_independent_expansion(
    per_channel: Profile, reseal: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    document = json.loads(dump_profile(per_channel))
    assert document["defaults"]["k"] == {
        "granularity": "per_channel",
        "group_size": 32,
        "symmetric": False,
        "transform": "none",
    }
    assert reseal(document)["digest"] == per_channel.digest


def test_granularity_alone_changes_the_digest(make_profile: Callable[..., Profile]) -> None:
    plain = {"geometry": ModelGeometry(2, 6, 3, 64, 32), "budget": AskedBudget("by hand")}
    for layers, differs in (
        ([LayerQuantization(4, 4), LayerQuantization(16, 4)], True),
        ([LayerQuantization(16, 4)] * 2, False),
    ):
        digests = {
            make_profile(**plain, layers=layers, k_layout=ScaleLayout(64, granularity=granularity)).digest
            for granularity in ("per_token", "per_channel")
        }
        assert len(digests) == 1 + differs


def test_new_evidence_never_changes_the_digest(make_profile: Callable[..., Profile], profile: Profile) -> None:
    assert profile.quality is not None
    better = QualityRecord.model_validate({**profile.quality.model_dump(), "kl_p99": 0.1, "perplexity": 12.0})
    unsearched = profile.provenance.model_copy(update={"calibration": None, "search": None})
    renamed = profile.model.model_copy(update={"id": "someone/else", "revision": None, "dtype": "float16"})
    for changes in (
        {"quality": better},
        {"quality": None},
        {"provenance": unsearched},
        {"model": renamed},
        {"budget": AskedBudget("35%")},
    ):
        assert make_profile(**changes).digest == profile.digest


def test_every_change_of_storage_changes_the_digest(
    make_profile: Callable[..., Profile], choices: tuple[LayerQuantization, ...], profile: Profile
) -> None:
    constants = choices[1].k_transform
    assert constants.mu is not None and constants.lam is not None
    changed_layers = {
        0: [replace(choices[0], k_bits=4), replace(choices[0], v_transform=choices[1].v_transform)],
        1: [
            replace(choices[1], k_transform=replace(constants, mu=nudge(constants.mu))),
            replace(choices[1], k_transform=replace(constants, lam=nudge(constants.lam))),
            replace(choices[1], v_bits=4),
        ],
        2: [replace(choices[2], v_bits=8)],
    }
    variants: list[dict[str, Any]] = [
        {"layers": [*choices[:number], choice, *choices[number + 1 :]]}
        for number, alternatives in changed_layers.items()
        for choice in alternatives
    ]
    variants += [
        {"k_layout": ScaleLayout(48)},
        {"v_layout": ScaleLayout(16)},
        {"symmetric": True},
        {"fit": "least_squares"},
    ]
    variants += [{"window": ExactWindow(32)}, {"window": ExactWindow(33)}, {"window": ExactWindow(0, 32)}]
    variants += [{"geometry": ModelGeometry(5, 3, 3, 48, 32)}, {"geometry": ModelGeometry(5, 6, 3, 48, 32, 1)}]
    variants += [{"layers": [choices[1], choices[0], *choices[2:]]}]
    digests = [make_profile(**changes).digest for changes in variants]
    assert len({profile.digest, *digests}) == len(variants) + 1


def test_digest_does_not_depend_on_which_transform_is_the_default(document: dict[str, Any], profile: Profile) -> None:
    assert document["defaults"]["k"]["transform"] == "hadamard"
    document["defaults"]["k"]["transform"] = "balanced"
    for number in (3, 4):
        document["layers"][number]["k"]["transform"] = "hadamard"
    reloaded = load_profile(json.dumps(document).encode())
    assert reloaded.digest == profile.digest
    assert reloaded.transform_name(4, "k") == "hadamard"


@pytest.mark.parametrize("name", ["group_size", "symmetric", "transform"])
def test_defaults_that_no_layer_uses_do_not_change_the_digest(make_profile: Callable[..., Profile], name: str) -> None:
    unquantized = make_profile(layers=[LayerQuantization(16, 16)] * 5)
    document = json.loads(unquantized.model_dump_json(by_alias=True))
    document["defaults"]["k"][name] = {"group_size": 16, "symmetric": True, "transform": "balanced"}[name]
    assert load_profile(json.dumps(document).encode()).digest == unquantized.digest


def test_every_finite_fp16_survives_its_encoding() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()].reshape(248, 256)
    item = json.loads(json.dumps(encode_fp16(finite)))
    assert torch.equal(Fp16Array.model_validate(item).decode().view(torch.int16), finite.view(torch.int16))
    assert (item["dtype"], item["shape"]) == ("float16", [248, 256])


def test_fp16_is_encoded_little_endian() -> None:
    assert encode_fp16(torch.tensor([[1.0]], dtype=torch.float16))["data"] == "ADw="
