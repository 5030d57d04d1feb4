"""The paper's layer groups: layers that are alike share one choice. Knows nothing of budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

EPS: Final = 0.05  # distance of e_o, and with it the number of neighbours, as the paper has them
MIN_SAMPLES: Final = 2
UNGROUPED: Final = -1


def dbscan(points: NDArray[np.float64], eps: float, min_samples: int) -> NDArray[np.int64]:
    """Cluster points [num_points, num_features] by density; quadratic in their number, which is that of layers.

    Neighbours are at most `eps` apart, in Euclidean distance; `min_samples` of them make a point a core of a cluster,
    the point itself counted.

    Returns:
        Cluster of each point, counted from 0 in the order of their first core points; -1 is noise.

    Source: Ester et al., KDD 1996.
    """
    distances = np.sqrt(((points[:, None, :] - points[None, :, :]) ** 2).sum(axis=2))
    is_neighbour = distances <= eps  # [num_points, num_points]
    is_core = is_neighbour.sum(axis=1) >= min_samples
    labels = np.full(len(points), UNGROUPED, dtype=np.int64)
    cluster = 0
    for start in np.flatnonzero(is_core):
        if labels[start] != UNGROUPED:
            continue
        frontier = [start]
        labels[start] = cluster
        while frontier:
            reached = np.flatnonzero(is_neighbour[frontier.pop()] & (labels == UNGROUPED))
            labels[reached] = cluster  # a point between two clusters stays with the one that reaches it first
            frontier.extend(reached[is_core[reached]])
        cluster += 1
    return labels


def group_layers(
    menus: Sequence[Hashable], features: Sequence[Sequence[float]], stages: Sequence[range]
) -> tuple[tuple[int, ...], ...]:
    """Group the layers of each pipeline stage that have the same menu and close features.

    Menus and features are in the order of the tuned layers, features of one length for equal menus. Each layer stands
    in one stage, by its place in that order.

    Returns:
        A partition of the places, in order of the first ones; what DBSCAN calls noise is a group of its own.

    Source: KVTuner (arXiv 2502.04420), section 5.3 and table 10.
    """
    groups: list[tuple[int, ...]] = []
    for stage in stages:
        for menu in {menus[place] for place in stage}:  # in any order: the groups are sorted at the end
            places = np.array([place for place in stage if menus[place] == menu])
            labels = dbscan(np.array([features[place] for place in places], dtype=np.float64), EPS, MIN_SAMPLES)
            groups += [(int(place),) for place in places[labels == UNGROUPED]]
            groups += [tuple(places[labels == label].tolist()) for label in range(labels.max() + 1)]
    return tuple(sorted(groups))
