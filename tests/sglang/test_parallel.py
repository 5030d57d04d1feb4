"""Ranks, stages and nodes together give what one process gives: all agree with the transformers host."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from transformers import AutoConfig

from kvtuner.exported_configs.profile.build import LayerQuantization
from kvtuner.precision import NO_WINDOW, ExactWindow
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
def window() -> ExactWindow:
    """The exact window of `uneven`; a test may be given another."""
    return NO_WINDOW


@pytest.fixture
def uneven(
    window: ExactWindow, model_folder: ModelFolder, profile_of: ProfileOf, mixed_layers: MixedLayers
) -> tuple[Path, Profile]:
    """A model of five layers, and a profile whose two stages differ in bits; values have short words.

    Every head has its own constants.
    """
    folder = model_folder("qwen2-bias", **LAYERS)
    config = AutoConfig.from_pretrained(folder)
    layers = [*mixed_layers(config)[:3], LayerQuantization(8, 8, HADAMARD), LayerQuantization(8, 4)]
    return folder, profile_of(config, layers, window=window, words=(32, 16), half_groups=True)


TOPOLOGIES = {
    "tp2": (1, ("--tp-size", "2")),
    "pp2": (1, ("--pp-size", "2")),
    "tp2 x pp2": (1, ("--tp-size", "2", "--pp-size", "2")),
    "two nodes, tp2": (2, ("--tp-size", "2")),
    "two nodes, tp2 x pp2": (2, ("--tp-size", "2", "--pp-size", "2")),
}


@pytest.fixture
def served(
    uneven: tuple[Path, Profile], serve: Serve, compare: Compare, prompts: Prompts, save_profile: SaveProfile
) -> Callable[..., tuple[Agreement, list[int]]]:
    """`served(flags, places)`: how near nodes in these places are to the host, and bytes per token that ranks say.

    Instead of them it is the bytes of a request's copies, where the profile has a window.
    """

    def run(flags: tuple[str, ...], places: list[Place], **variables: str) -> tuple[Agreement, list[int]]:
        folder, profile = uneven
        with serve(
            folder, "--kvtuner-profile", str(save_profile(profile)), *flags, places=places, **variables
        ) as server:
            agreement = compare(server, folder, profile, prompts(5, 33, 1, 60, 17, 48), 40)
            log = server.log
        pattern = r"([\d,]+) bytes for each of" if profile.window.num_tokens else r"  ([\d,]+) bytes per token"
        return agreement, sorted(int(text.replace(",", "")) for text in re.findall(pattern, log))

    return run


def ranks_of(flags: tuple[str, ...]) -> tuple[int, list[range]]:
    """Return the tensor-parallel ranks, and the layers of each stage."""
    return 2 if "--tp-size" in flags else 1, [range(2), range(2, 5)] if "--pp-size" in flags else [range(5)]


def expected_bytes(profile: Profile, flags: tuple[str, ...]) -> list[int]:
    """Return the bytes of every rank, by the formula."""
    tp_size, stages = ranks_of(flags)
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


@pytest.mark.parametrize("window", [ExactWindow(6, 2)], ids=str)
@pytest.mark.parametrize(
    "topology", [*(pytest.param(each, marks=pytest.mark.full) for each in ("tp2", "pp2")), "tp2 x pp2"]
)
def test_ranks_keep_the_exact_window_of_their_heads_and_layers(
    topology: str,
    window: ExactWindow,
    uneven: tuple[Path, Profile],
    served: Callable[..., tuple[Agreement, list[int]]],
    here: Place,
) -> None:
    nodes, flags = TOPOLOGIES[topology]
    agreement, copied_bytes = served(flags, [here] * nodes)
    assert is_near(agreement), agreement
    geometry, (tp_size, stages) = uneven[1].geometry, ranks_of(flags)
    heads, channels = geometry.num_kv_heads // tp_size, geometry.head_dim
    # Keys and values in float32, and a position of four bytes, on every layer.
    of_layer = window.num_tokens * (2 * 4 * heads * channels + 4)
    assert copied_bytes == sorted([of_layer * len(stage) for stage in stages] * tp_size)


@pytest.mark.full
def test_two_nodes_start_with_an_exact_window_by_uniform_flags(
    serve: Serve, compare: Compare, prompts: Prompts, model_folder: ModelFolder, profile_of: ProfileOf, here: Place
) -> None:
    folder = model_folder("llama-gqa", num_attention_heads=8, num_key_value_heads=4, head_dim=64, **LAYERS)
    layers = [LayerQuantization(4, 4)] * LAYERS["num_hidden_layers"]
    profile = profile_of(AutoConfig.from_pretrained(folder), layers, symmetric=True, window=ExactWindow(128))
    flags = (
        "--tp-size", "4", "--enable-kvtuner-quant", "--kvtuner-nbits-key", "4", "--kvtuner-nbits-value", "4",
        "--kvtuner-asym", "false", "--kvtuner-axis-key", "0", "--kvtuner-axis-value", "0",
        "--kvtuner-q-group-size", "64", "--kvtuner-residual-length", "128",
    )  # fmt: skip
    with serve(folder, *flags, places=[here] * 2) as server:
        agreement = compare(server, folder, profile, prompts(5, 150, 60), 40)
        log = server.log
    assert is_near(agreement), agreement
    assert log.count(f"by profile {profile.digest}") == 4
    assert log.count(f"{profile.window}, ") == 4


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
