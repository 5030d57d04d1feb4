"""DBSCAN against scikit-learn, and the paper's grouping of layers."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.cluster import DBSCAN

from kvtuner.search_spaces.groups import UNGROUPED, dbscan, group_layers


def same_partition(left: list[int], right: list[int]) -> bool:
    """Whether two labellings agree up to the names of clusters; noise is noise in both."""
    pairs = set(zip(left, right, strict=True))
    is_bijection = len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    return is_bijection and all((a == UNGROUPED) == (b == UNGROUPED) for a, b in pairs)


@pytest.mark.parametrize("min_samples", [1, 2, 3, 5])
@pytest.mark.parametrize("num_features", [1, 2, 5])
def test_dbscan_equals_scikit_learn_on_random_points(num_features: int, min_samples: int) -> None:
    rng = np.random.default_rng(num_features * 10 + min_samples)
    num_clustered = num_noise = 0
    for _ in range(25):
        points = rng.uniform(0, 1, size=(int(rng.integers(1, 60)), num_features))
        eps = float(rng.uniform(0.02, 0.6))
        ours = dbscan(points, eps, min_samples).tolist()
        theirs = DBSCAN(eps=eps, min_samples=min_samples).fit_predict(points).tolist()
        assert same_partition(ours, theirs)
        num_clustered += sum(label != UNGROUPED for label in ours)
        num_noise += ours.count(UNGROUPED)
    assert num_clustered
    assert num_noise or min_samples == 1


def test_points_at_exactly_eps_are_neighbours() -> None:
    assert dbscan(np.array([[0.0], [0.5], [2.0]]), 0.5, 2).tolist() == [0, 0, UNGROUPED]


def test_a_chain_of_near_points_is_one_cluster() -> None:
    assert dbscan(np.arange(6, dtype=float)[:, None] * 0.04, 0.05, 2).tolist() == [0] * 6


def test_only_layers_with_the_same_menu_are_grouped() -> None:
    groups = group_layers(["a", "b", "a", "b"], [[0.1], [0.1], [0.12], [0.11]], [range(4)])
    assert groups == ((0, 2), (1, 3))


def test_layers_are_grouped_up_to_the_papers_distance_of_e_o() -> None:
    assert group_layers(["a"] * 2, [[0.0, 0.0], [0.03, 0.0399]], [range(2)]) == ((0, 1),)
    assert group_layers(["a"] * 2, [[0.0, 0.0], [0.03, 0.0401]], [range(2)]) == ((0,), (1,))


def test_layers_that_are_noise_are_groups_of_their_own() -> None:
    groups = group_layers(["a"] * 5, [[0.1], [0.9], [0.12], [0.5], [0.13]], [range(5)])
    assert groups == ((0, 2, 4), (1,), (3,))


def test_groups_partition_the_layers_and_never_straddle_stages() -> None:
    rng = np.random.default_rng(0)
    stages = [range(5), range(5, 11), range(11, 12)]
    num_shared = 0
    for _ in range(50):
        menus = rng.integers(0, 2, size=12).tolist()
        groups = group_layers(menus, [[menus[i], rng.uniform(0, 0.3)] for i in range(12)], stages)
        assert sorted(layer for group in groups for layer in group) == list(range(12))
        assert groups == tuple(sorted(groups))
        for group in groups:
            assert sum(group[0] in stage and group[-1] in stage for stage in stages) == 1
            assert len({menus[layer] for layer in group}) == 1
        num_shared += sum(len(group) > 1 for group in groups)
    assert num_shared
