"""Ranks, stages and nodes together give what one process gives: all agree with the transformers host."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.quant import Transform
from kvtuner.transforms import TransformKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fixture_types import Compare, LaunchedNodes, MixedLayers, ModelFolder, ProfileOf, Prompts, SaveProfile, Serve
    from sglang_server import Agreement, Place

    from kvtuner.exported_configs.profile.profile import Profile

LAYERS = {"num_hidden_layers": 5}
HADAMARD = Transform(TransformKind.parse("hadamard"))


@pytest.fixture
def uneven(model_folder: ModelFolder, profile_of: ProfileOf, mixed_layers: MixedLayers) -> tuple[Path, Profile]:
    """A model of five layers, and a profile whose two stages differ in bits; values have short words.

    Every head has its own constants.
    """
    folder = model_folder("qwen2-bias", **LAYERS)
    config = AutoConfig.from_pretrained(folder)
    first = mixed_layers(config)[:3]
    layers = [*first, LayerQuantization(8, 8, HADAMARD), LayerQuantization(8, 4)]
    return folder, profile_of(config, layers, words=(32, 16), half_groups=True)


TOPOLOGIES = {
    "tp2": (1, ("--tp-size", "2")),
    "pp2": (1, ("--pp-size", "2")),
    "two nodes, tp2": (2, ("--tp-size", "2")),
    "two nodes, tp2 x pp2": (2, ("--tp-size", "2", "--pp-size", "2")),
}


@pytest.fixture
def served(
    uneven: tuple[Path, Profile], serve: Serve, compare: Compare, prompts: Prompts, save_profile: SaveProfile
) -> Callable[..., tuple[Agreement, list[int]]]:
    """`served(flags, places)`: how near nodes in these places are to the host, and bytes per token that ranks say."""

    def run(flags: tuple[str, ...], places: list[Place], **variables: str) -> tuple[Agreement, list[int]]:
        folder, profile = uneven
        with serve(
            folder, "--kvtuner-profile", str(save_profile(profile)), *flags, places=places, **variables
        ) as server:
            agreement = compare(server, folder, profile, prompts(5, 33, 1, 60, 17, 48), 40)
            log = server.log
        return agreement, sorted(int(text.replace(",", "")) for text in re.findall(r"  ([\d,]+) bytes per token", log))

    return run


def expected_bytes(profile: Profile, flags: tuple[str, ...]) -> list[int]:
    """Return the bytes of every rank, by the formula."""
    tp_size = 2 if "--tp-size" in flags else 1
    stages = [range(2), range(2, 5)] if "--pp-size" in flags else [range(5)]
    shape = profile.row_shape(tp_size)
    return sorted([sum(shape.pair_bytes(profile.pairs[layer]) for layer in stage) for stage in stages] * tp_size)


def is_near(agreement: Agreement) -> bool:
    """Whether two runs agree as the design defines it."""
    assert agreement.own > 1e-4, "the profile must change something"
    return bool(agreement.divergence <= 0.02 * agreement.own + 1e-6 and agreement.same_argmax >= 0.995)


@pytest.mark.parametrize(
    "topology", ["tp2", "pp2", pytest.param("two nodes, tp2", marks=pytest.mark.full), "two nodes, tp2 x pp2"]
)
def test_ranks_agree_with_the_transformers_host(
    topology: str, uneven: tuple[Path, Profile], served: Callable[..., tuple[Agreement, list[int]]], here: Place
) -> None:
    nodes, flags = TOPOLOGIES[topology]
    agreement, row_bytes = served(flags, [here] * nodes)
    assert is_near(agreement), agreement
    assert row_bytes == expected_bytes(uneven[1], flags)


def test_nodes_that_share_neither_network_nor_memory(
    uneven: tuple[Path, Profile], served: Callable[..., tuple[Agreement, list[int]]], apart: list[Place]
) -> None:
    flags = ("--tp-size", "2")
    agreement, row_bytes = served(flags, apart, GLOO_SOCKET_IFNAME="eth0")
    assert is_near(agreement), agreement
    assert row_bytes == expected_bytes(uneven[1], flags)


def test_nodes_with_different_profiles_refuse_to_start_and_name_both(
    uneven: tuple[Path, Profile], profile_of: ProfileOf, save_profile: SaveProfile, launched_nodes: LaunchedNodes
) -> None:
    folder, profile = uneven
    other = profile_of(AutoConfig.from_pretrained(folder), [LayerQuantization(4, 4)] * 5)
    flags = [("--kvtuner-profile", str(save_profile(each))) for each in (profile, other)]
    statuses, output = launched_nodes(folder, flags, "--tp-size", "2")
    assert all(status != 0 for status in statuses)
    assert "ready to roll" not in output
    lines = [line for line in output.splitlines() if line.startswith("kvtuner: ranks must serve one profile")]
    assert lines
    assert all(profile.digest in line and other.digest in line for line in lines)


def test_a_node_without_the_profile_is_missed(
    uneven: tuple[Path, Profile], save_profile: SaveProfile, launched_nodes: LaunchedNodes
) -> None:
    folder, profile = uneven
    flags = [("--kvtuner-profile", str(save_profile(profile))), ()]
    statuses, output = launched_nodes(folder, flags, "--tp-size", "2", KVTUNER_AGREEMENT_S="20")
    assert all(status != 0 for status in statuses)
    assert "ready to roll" not in output
    assert re.search(r"kvtuner: .*rank 1 says nothing: was its server started with the same --kvtuner-profile", output)
