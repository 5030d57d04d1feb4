"""Ranks, stages and nodes together give what one process gives: all agree with the transformers host."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoConfig

from kvtuner.exported_configs.build import LayerChoice
from kvtuner.quant import Transform, TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtuner.exported_configs.profile import Profile

LAYERS = {"num_hidden_layers": 5}
HADAMARD = Transform(TransformKind(hadamard=True))


@pytest.fixture
def uneven(model_folder: Any, profile_of: Any, mixed_layers: Any) -> tuple[Any, Profile]:
    """A model of five layers, and a profile whose two stages differ in bits; every head has its own constants."""
    folder = model_folder("qwen2-bias", **LAYERS)
    config = AutoConfig.from_pretrained(folder)
    first = mixed_layers(config)[:3]
    return folder, profile_of(config, [*first, LayerChoice(8, 8, HADAMARD), LayerChoice(8, 4)])


TOPOLOGIES = {
    "tp2": (1, ("--tp-size", "2")),
    "pp2": (1, ("--pp-size", "2")),
    "two nodes, tp2": (2, ("--tp-size", "2")),
    "two nodes, tp2 x pp2": (2, ("--tp-size", "2", "--pp-size", "2")),
}


@pytest.fixture
def serves_alike(uneven: Any, serve: Any, compare: Any, prompts: Any, save_profile: Any) -> Callable[..., None]:
    """`serves_alike(flags, places)`: nodes in these places agree with the host, and say what they store."""

    def check(flags: tuple[str, ...], places: list[Any], **variables: str) -> None:
        folder, profile = uneven
        with serve(
            folder, "--kvtuner-profile", str(save_profile(profile)), *flags, places=places, **variables
        ) as server:
            agreement = compare(server, folder, profile, prompts(5, 33, 1, 60, 17, 48), 40)
            log = server.log
        assert agreement.own > 1e-4
        assert agreement.divergence <= 0.02 * agreement.own + 1e-6, agreement
        assert agreement.same_argmax >= 0.995, agreement
        tp_size = 2 if "--tp-size" in flags else 1
        stages = [range(2), range(2, 5)] if "--pp-size" in flags else [range(5)]
        said = sorted(int(text.replace(",", "")) for text in re.findall(r"  ([\d,]+) bytes per token", log))
        shape = profile.row_shape(tp_size)
        expected = [sum(shape.pair_bytes(profile.pairs[layer]) for layer in stage) for stage in stages]
        assert said == sorted(expected * tp_size)

    return check


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_ranks_agree_with_the_transformers_host(topology: str, serves_alike: Any, here: Any) -> None:
    nodes, flags = TOPOLOGIES[topology]
    serves_alike(flags, [here] * nodes)


def test_nodes_that_share_neither_network_nor_memory(serves_alike: Any, apart: Any) -> None:
    serves_alike(("--tp-size", "2"), apart, GLOO_SOCKET_IFNAME="eth0")


def test_nodes_with_different_profiles_refuse_to_start_and_name_both(
    uneven: Any, profile_of: Any, save_profile: Any, launched_nodes: Any
) -> None:
    folder, profile = uneven
    other = profile_of(AutoConfig.from_pretrained(folder), [LayerChoice(4, 4)] * 5)
    flags = [("--kvtuner-profile", str(save_profile(each))) for each in (profile, other)]
    statuses, output = launched_nodes(folder, flags, "--tp-size", "2")
    assert all(status != 0 for status in statuses)
    assert "ready to roll" not in output
    lines = [line for line in output.splitlines() if line.startswith("kvtuner: ranks must serve one profile")]
    assert lines
    assert all(profile.digest in line and other.digest in line for line in lines)


def test_a_node_without_the_profile_is_missed(uneven: Any, save_profile: Any, launched_nodes: Any) -> None:
    folder, profile = uneven
    flags = [("--kvtuner-profile", str(save_profile(profile))), ()]
    statuses, output = launched_nodes(folder, flags, "--tp-size", "2", KVTUNER_AGREEMENT_S="20")
    assert all(status != 0 for status in statuses)
    assert "ready to roll" not in output
    assert re.search(r"kvtuner: .*rank 1 says nothing: was its server started with the same --kvtuner-profile", output)
